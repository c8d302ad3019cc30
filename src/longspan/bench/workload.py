"""The work that is measured: training a model with random weights, or adapters of it, on random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longspan.bench.settings import Work
from longspan.engines import Engine, StepsItself, build_engine
from longspan.integrations.adapters import add_adapter
from longspan.integrations.random_weights import untrained_model
from longspan.integrations.transformers import Applied, prepare
from longspan.keep import Keep, Memory
from longspan.optim import build_optimizer, choose_stepping
from longspan.stream.compiled import Compiler

LEARNING_RATE = 1e-5
MAX_NORM = 1.0


def random_tokens(vocabulary: int, tokens: int, seed: int, step: int) -> Tensor:
    """Return the row of a step, [1, tokens], on the host: the same for everyone who takes part in a comparison."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randint(vocabulary, (1, tokens), generator=generator)


@dataclass
class Workload:
    """A model that trains.

    Args:
        module: what the engine made of the model.
        stepping: see `longspan.optim.Stepping`.
    """

    handle: Applied
    module: nn.Module
    engine: Engine
    stepping: Any
    work: Work
    device: torch.device
    compilers: dict[str, Compiler] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return self.handle.model.config.get_text_config().vocab_size

    def close(self) -> None:
        """Have the engine let go of the model, if it holds more of it than torch knows."""
        if isinstance(self.engine, StepsItself):
            self.engine.close()

    def use(self, memory: Memory) -> None:
        """Let layers keep other tensors from the next step on; compiled code is kept from earlier settings."""
        self.handle.memory = memory
        backend = memory.compile
        self.handle.compiler = None if backend is None else self.compilers.setdefault(backend, Compiler(backend))

    def row(self, tokens: int, step: int) -> Tensor:
        """Return the tokens of a step on the device."""
        return random_tokens(self.vocabulary, tokens, self.work.seed, step).to(self.device)

    def step(self, ids: Tensor, lr: float = LEARNING_RATE) -> float:
        """Train on a row and return its loss."""
        self.stepping.begin(lr)
        part = self.handle.shard({"input_ids": ids, "labels": ids.clone()})
        with self.engine.accumulating(last=True):
            loss = self.module(**part).loss
            self.engine.backward(loss)
        self.engine.reduce()
        self.stepping.norm()
        self.stepping.finish()
        return float(loss.detach())

    def warm_up(self, tokens: int) -> int:
        """Compile what the memory setting compiles, and make the optimizer's state, on a row of at most `tokens`.

        The step has a learning rate of 0, so that the weights stay those that everyone starts from.

        Returns:
            The length of the row: two tiles.
        """
        tile = self.handle.memory.tile_tokens or 2048
        length = min(tokens, 2 * tile * self.work.sp)
        for _ in range(2 if self.work.chosen_engine == "zero-3" else 1):  # it settles the order of parameters in two
            self.step(self.row(length, 999), lr=0.0)
        return length

    def reserve(self, tokens: int) -> None:
        """Pin the host memory of steps of this length, once it has warmed up: the first would take the time for it."""
        self.handle.reserve(self.handle.shard({"input_ids": self.row(tokens, 0)}))


def build(config: Any, work: Work, memories: Sequence[Memory], device: torch.device) -> Workload:
    """Build the model, prepare it and give it to its engine and optimizer.

    Args:
        memories: those that will be used; if one of them streams, layers are prepared for it.

    Raises:
        LongspanError: whatever of it cannot work.
    """
    compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = untrained_model(config, work.seed, compute_dtype, device)
    mixed = work.chosen_engine != "single" and work.adapter is None
    if mixed:
        model.float()
    if work.adapter is not None:
        model = add_adapter(model, work.adapter, work.seed).train()
    engine = build_engine(work.chosen_engine, work.sp, compute_dtype if mixed and device.type == "cuda" else None)
    handle = prepare(
        model,
        work.sp,
        ulysses_degree=work.ulysses,
        ring_degree=work.ring,
        kernel=work.kernel,
        memory=next((memory for memory in memories if memory.streams), Memory(keep=Keep.GRAPH)),
        grad_reduction=engine.grad_reduction,
    )
    module = engine.wrap(model, handle)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    stepping = choose_stepping(build_optimizer(work.optimizer, module, lr=0.0), engine, work.in_backward, MAX_NORM)
    return Workload(handle, module, engine, stepping, work, device)
