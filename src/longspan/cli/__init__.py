"""The command line."""

import logging

from longspan.cli.app import app, main

__all__ = ["app", "main"]

for _library in ("torchao", "torch.utils._pytree"):
    # Where torchao is installed, transformers imports it, and each process would tell of its parts that fit other GPUs.
    logging.getLogger(_library).setLevel(logging.ERROR)
