"""The command line."""

import logging

for _library in ("torchao", "torch.utils._pytree"):
    # Where torchao is installed, transformers imports it, and each process would tell of its parts that fit other GPUs.
    logging.getLogger(_library).setLevel(logging.ERROR)
# DeepSpeed, which accelerate imports where it is installed, sets its logger's level by itself and writes to stdout.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)

from longspan.cli.app import app, main  # noqa: E402  (its imports may load that library)

__all__ = ["app", "main"]
