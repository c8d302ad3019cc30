"""AdamW whose master parameters and moments are in host memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.errors import ConfigError
from longspan.kernels.protocol import wide
from longspan.optim.staging import Allowance, Lane, Lanes

_STATES = ("master", "exp_avg", "exp_avg_sq")
_CHUNK_ELEMENTS = 1 << 22
_WAITING_BYTES = 1 << 30


class HostAdamW(torch.optim.Optimizer):
    """Keep float32 master parameters and both moments on the host; the device has working parameters only.

    A working parameter is its master, rounded to the parameter's type. Gradients go to the host chunk by chunk, where
    torch's fused AdamW moves the masters in other threads, and results come back. Nothing of it is allocated before the
    first step, whose parameters become the masters.

    Args:
        params: parameters or groups, as for torch.optim.AdamW; sharded ones (DTensor) are stepped shard by shard.
        chunk_elements: what is carried and computed on at a time; a multiple of 64, so that chunks end where the kernel
            changes from vectors to single numbers in no other place than for whole tensors.
        waiting_bytes: gradients on the device that `submit` lets wait for their turn; more make it wait.

    Cost: 12 bytes per parameter in pageable host memory (24 for float64), two pinned chunks; a step moves each gradient
        to the host and each parameter back once.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        chunk_elements: int = _CHUNK_ELEMENTS,
        waiting_bytes: int = _WAITING_BYTES,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._chunk_elements = chunk_elements
        self._waiting = Allowance(waiting_bytes)
        self._lanes: dict[torch.device, Lanes] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step every parameter that has a gradient, and return when the working parameters are on their way."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.submit(parameter, group)
        self.finish()
        return loss

    @torch.no_grad()
    def submit(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Begin the step of a parameter that has a gradient, which must stay as it is until `finish`.

        Until then nothing may read the parameter. Once a step, since a second one would overtake the first.
        """
        assert parameter.grad is not None
        target, gradient = local(parameter).detach().view(-1), local(parameter.grad).contiguous().view(-1)
        torch.autograd.graph.increment_version(parameter)  # now: the write comes at a time that autograd cannot check
        state = self.state[parameter]
        fresh = not state
        if fresh:
            state["step"] = torch.zeros(())
            state |= {name: _empty(local(parameter)) for name in _STATES}
        state["step"] += 1
        if not target.numel():
            return
        lanes = self._lanes_of(target)
        held_bytes = gradient.numel() * gradient.element_size()
        self._waiting.take(held_bytes)
        starts = range(0, target.numel(), self._chunk_elements)
        let_go = partial(self._waiting.give, held_bytes)
        update = _Update(target, gradient, state, group, fresh, lanes, len(starts), let_go)
        for start in starts:
            lanes.start(update.of(slice(start, start + self._chunk_elements)))

    def finish(self) -> None:
        """Wait for the updates that were begun; what the device runs from now on sees the new parameters."""
        for lanes in self._lanes.values():
            lanes.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the states, as DTensor where parameters are; the tensors are the optimizer's own, not copies."""
        self.finish()
        packed = super().state_dict()
        for index, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            state = packed["state"].get(index)
            if state is not None:
                packed["state"][index] = {
                    name: value if name == "step" else _like(parameter, value) for name, value in state.items()
                }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the states of a state dict, parameter by parameter; the model's parameters are not touched.

        Load it with `torch.load(..., mmap=True)`, so that the host need not hold it twice.

        Raises:
            ConfigError: it is of other parameters or of another optimizer.
        """
        self.finish()
        groups = state_dict["param_groups"]
        counts = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if counts != expected:
            raise ConfigError(f"The optimizer's state has groups of {counts} parameters, the model of {expected}.")
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: copy.deepcopy(value) for name, value in saved.items() if name != "params"})
        indices = [index for group in groups for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            self.state.pop(parameter, None)
            if index in state_dict["state"]:
                self.state[parameter] = _own(parameter, state_dict["state"][index], index)

    def _lanes_of(self, target: Tensor) -> Lanes:
        if target.device not in self._lanes:
            size_bytes = max(p.element_size() for group in self.param_groups for p in group["params"])
            self._lanes[target.device] = Lanes(target.device, self._chunk_elements * size_bytes)
        return self._lanes[target.device]


class _Update:
    """One step of one parameter, chunk by chunk."""

    def __init__(
        self,
        target: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
        fresh: bool,
        lanes: Lanes,
        chunks: int,
        let_go: Callable[[], None],
    ) -> None:
        self._target, self._fresh = target, fresh
        self._gradient: Tensor | None = gradient
        self._states = [state[name].view(-1) for name in _STATES]
        self._step = state["step"].clone()
        beta1, beta2 = group["betas"]
        self._numbers = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
        }
        self._lanes, self._ready = lanes, lanes.ready()
        self._left, self._let_go, self._counting = chunks, let_go, threading.Lock()

    def of(self, rows: slice) -> Callable[[Lane], None]:
        """Return the work on a chunk."""
        return lambda lane: self._run(rows, lane)

    def _run(self, rows: slice, lane: Lane) -> None:
        master, exp_avg, exp_avg_sq = (state[rows] for state in self._states)
        try:
            if self._fresh:
                master.copy_(lane.fetch(self._target[rows], self._ready))
                exp_avg.zero_()
                exp_avg_sq.zero_()
            assert self._gradient is not None
            fetched = lane.fetch(self._gradient[rows], self._ready)
        finally:
            self._fetched()
        with self._lanes.computing:
            gradient = lane.widened(fetched, master.dtype)
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                [master], [gradient], [exp_avg], [exp_avg_sq], [], [self._step],
                amsgrad=False, maximize=False, **self._numbers,
            )  # fmt: skip
            lane.store(master, self._target[rows])

    def _fetched(self) -> None:
        """Let the gradient go with its last chunk."""
        with self._counting:
            self._left -= 1
            last = not self._left
        if last:
            self._gradient = None
            self._let_go()


def local(tensor: Tensor) -> Tensor:
    """Return a process's part of a tensor, which is all of it unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def host_bytes(parameters: Iterable[Tensor]) -> int:
    """Count the host memory that HostAdamW takes for parameters in this process."""
    return sum(3 * local(p).numel() * wide(p.dtype).itemsize for p in parameters)


def empty_on_host(parameter: nn.Parameter) -> Tensor:
    """Return host memory for a state of a parameter, sharded as it is, for a checkpoint to be read into."""
    return _like(parameter, _empty(local(parameter)))


def _empty(like: Tensor) -> Tensor:
    # Pageable: pinning it would take a second per 1.5 GiB. Untouched, so that it costs nothing until it is written.
    return torch.empty(like.shape, dtype=wide(like.dtype), device="cpu")


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Present a local state as the parameter is sharded, so that checkpoints know which part it is."""
    if not isinstance(parameter, DTensor):
        return value
    spec = parameter._spec
    assert spec.tensor_meta is not None
    meta = spec.tensor_meta._replace(dtype=value.dtype)
    # Not DTensor.from_local: it would move the tensor to the mesh's device.
    return DTensor(value, replace(spec, tensor_meta=meta), requires_grad=False)  # pyright: ignore[reportCallIssue]


def _own(parameter: nn.Parameter, saved: dict[str, Any], index: int) -> dict[str, Tensor]:
    """Copy a parameter's saved states to memory of the optimizer's own."""
    where = local(parameter)
    state = {"step": torch.as_tensor(saved.get("step", 0.0), dtype=torch.float32, device="cpu").clone()}
    for name in _STATES:
        value = saved.get(name)
        shape = tuple(local(value).shape) if isinstance(value, Tensor) else None
        if not isinstance(value, Tensor) or shape != tuple(where.shape):
            raise ConfigError(
                f"The optimizer's state of parameter {index} has {name} of shape {shape}, expected "
                f"{tuple(where.shape)}: it belongs to another optimizer, model or number of processes."
            )
        state[name] = _empty(where).copy_(local(value))
    return state
