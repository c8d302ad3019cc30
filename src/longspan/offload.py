"""Keep the inputs of checkpointed regions in host memory from forward to backward, in users' own loops."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from longspan.errors import ConfigError, ModelError, TrainingError
from longspan.host import Buffer, Copier, Layout, Pool, copier_for

_AHEAD = 2
"""Inputs that backward fetches before it needs them, if as many may be on the device."""

_NEAR_FRAMES = 4
_GENERATOR = torch_checkpoint._checkpoint_without_reentrant_generator.__code__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # pyright: ignore[reportFunctionMemberAccess]


def offload_checkpoints(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
    *,
    allocate: Callable[[int, bool], Tensor] | None = None,
) -> OffloadedCheckpoints:
    """Return a context in which the inputs of checkpointed regions lie in host memory until backward needs them.

    For activation checkpointing of torch or transformers, non-reentrant or reentrant, in forward and backward of users'
    own loops. What else autograd saves stays where it is. Enter the context around forward and backward of a step; the
    same one may be entered again in every step and then reuses its host memory, whatever the lengths.

    Args:
        use_pin_memory: host memory is pinned, so that copies need not wait.
        use_streams: copy on a stream of its own, and fetch inputs ahead of time in backward; False copies in line.
        min_offload_bytes: smaller inputs stay on the device.
        max_fwd_stash_count: inputs whose copies to the host may be under way at a time.
        max_cpu_buffer_pool_count: host buffers, of one input each, that are kept for reuse.
        keep_last_count: the newest inputs, which backward needs first and which stay on the device.
        allocate: makes so many bytes of host memory, pinned if its second argument says so; None for torch's.

    Raises:
        ConfigError: a negative number, or neither true nor false.

    Cost: per input one copy to the host and one back. On the device are, besides the input at work, at most
        `max_fwd_stash_count + keep_last_count` inputs. No host sync with pinned memory.
    """
    counts = {
        "min_offload_bytes": min_offload_bytes,
        "max_fwd_stash_count": max_fwd_stash_count,
        "max_cpu_buffer_pool_count": max_cpu_buffer_pool_count,
        "keep_last_count": keep_last_count,
    }
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{name} must be an integer of at least 0, got {value!r}.")
    for name, value in (("use_pin_memory", use_pin_memory), ("use_streams", use_streams)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}.")
    pool = Pool(max_cpu_buffer_pool_count, use_pin_memory, allocate)
    return OffloadedCheckpoints(pool, use_streams, min_offload_bytes, max_fwd_stash_count, keep_last_count)


@dataclass(frozen=True)
class _Untouched:
    """A saved tensor that stays where it is.

    Detached, since an output that an operation saves would hold that operation, and the graph never be freed. Hooks
    switch autograd's own check of the version off.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Untouched:
        return cls(tensor.detach(), tensor._version)

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise _modified(self.tensor.shape)
        return self.tensor


class _Input:
    """An input of a checkpointed region.

    Args:
        source: it, while it is on the device.
        index: how many inputs were saved before it.
    """

    def __init__(self, source: Tensor, index: int, pool: Pool) -> None:
        self.source: Tensor | None = source
        self.version, self.index, self.pool = source._version, index, pool
        self.layout = Layout.of(source)
        self.copier: Copier | None = None
        self.buffer: Buffer | None = None
        self.fetched: tuple[Tensor, Any] | None = None
        self.modified = False

    def check(self) -> None:
        """Notice if it was written to since it was saved."""
        self.modified |= self.source is not None and self.source._version != self.version

    def fetch(self) -> None:
        """Start to copy it back."""
        assert self.buffer is not None and self.copier is not None
        self.fetched = self.copier.fetch(self.buffer, self.layout)

    def __del__(self) -> None:
        if self.fetched is not None and self.copier is not None:  # nobody has waited for the copy
            self.copier.abandon(self.fetched[0])
        if self.buffer is not None:
            self.pool.give(self.buffer)


class OffloadedCheckpoints:
    """The context that `offload_checkpoints` returns."""

    def __init__(
        self, pool: Pool, use_streams: bool, min_offload_bytes: int, max_fwd_stash_count: int, keep_last_count: int
    ) -> None:
        self.pool, self.use_streams, self.min_offload_bytes = pool, use_streams, min_offload_bytes
        self.max_stashed = max_fwd_stash_count if use_streams else 0
        self.max_kept = keep_last_count
        self.max_ahead = min(_AHEAD, max_fwd_stash_count + keep_last_count) if use_streams else 0
        self._copiers: dict[torch.device, Copier] = {}
        self._hooks: saved_tensors_hooks | None = None
        self._saved: list[weakref.ref[_Input]] = []
        self._kept: deque[weakref.ref[_Input]] = deque()
        # Sources are held until their copies are done, also if nobody needs these any more.
        self._stashed: deque[tuple[weakref.ref[_Input], Tensor, Copier, Any]] = deque()
        self._inputs = self._others = 0
        self._tried = False

    def __enter__(self) -> OffloadedCheckpoints:
        if self._hooks is not None:
            raise TrainingError("This offload_checkpoints context is entered already; make another one to nest them.")
        if not self._tried:
            _check_torch()
            self._tried = True
        self._inputs = self._others = 0
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        assert self._hooks is not None
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(kind, *error)
        while self._stashed:
            self._release(*self._stashed.popleft())
        self._saved.clear()
        self._kept.clear()
        if kind is None and self._others and not self._inputs:
            warnings.warn(
                "offload_checkpoints found no input of a checkpointed region: switch activation checkpointing on, and "
                "pass hidden states to checkpointed functions by position, not by keyword.",
                stacklevel=2,
            )

    def _pack(self, tensor: Tensor) -> _Untouched | _Input:
        args = _region(sys._getframe())
        if args is None:
            self._others += 1
            return _Untouched.of(tensor)
        self._inputs += 1
        if not self._moves(tensor, args):
            return _Untouched.of(tensor)
        while self._saved and self._saved[-1]() is None:
            self._saved.pop()
        item = _Input(tensor.detach(), len(self._saved), self.pool)
        self._saved.append(weakref.ref(item))
        self._kept.append(weakref.ref(item))
        while len(self._kept) > self.max_kept:
            oldest = self._kept.popleft()()
            if oldest is not None:
                self._offload(oldest)
        return item

    def _moves(self, tensor: Tensor, args: tuple[Any, ...]) -> bool:
        """Whether an input goes to the host: hidden states do; parameters and what shares its elements do not."""
        if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
            return False
        if tensor.numel() * tensor.element_size() < self.min_offload_bytes:
            return False
        if any(isinstance(arg, nn.Parameter) and arg.data_ptr() == tensor.data_ptr() for arg in args):
            return False
        if type(tensor) is not Tensor:
            raise ModelError(
                f"A checkpointed region was given a {type(tensor).__name__}, which offload_checkpoints does not move; "
                "give it plain tensors, or train without offload_checkpoints."
            )
        return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))

    def _offload(self, item: _Input) -> None:
        """Start to copy an input to the host."""
        item.check()
        source = item.source
        if source is None or item.modified:
            item.source = None
            return
        if source.device not in self._copiers:
            self._copiers[source.device] = copier_for(source.device, self.use_streams)
        item.copier = self._copiers[source.device]
        item.buffer = self.pool.take(item.layout.nbytes, source.device)
        done = item.copier.save(source, item.buffer)
        self._stashed.append((weakref.ref(item), source, item.copier, done))
        while len(self._stashed) > self.max_stashed:
            self._release(*self._stashed.popleft())

    def _release(self, ref: weakref.ref[_Input], source: Tensor, copier: Copier, done: Any) -> None:
        """Let an input go: what this stream does from now on happens after its copy."""
        copier.wait(done)
        item = ref()
        if item is not None:
            item.check()
            item.source = None

    def _unpack(self, item: _Untouched | _Input) -> Tensor:
        if isinstance(item, _Untouched):
            return item.unpack()
        item.check()
        if item.modified:
            raise _modified(item.layout.shape)
        if item.source is not None:
            tensor = item.source
            for entry in [entry for entry in self._stashed if entry[0]() is item]:
                self._stashed.remove(entry)
                self._release(*entry)
        else:
            if item.fetched is None:
                item.fetch()
            assert item.fetched is not None and item.copier is not None
            (tensor, done), item.fetched = item.fetched, None
            item.copier.wait(done)
        self._fetch_ahead(item.index)
        return tensor

    def _fetch_ahead(self, index: int) -> None:
        """Start to copy the inputs back that backward needs next."""
        ready = 0
        for ref in reversed(self._saved[:index]):
            if ready >= self.max_ahead:
                return
            item = ref()
            if item is None or item.modified:
                continue
            if item.source is None and item.fetched is None:
                item.fetch()
            ready += 1


def _region(frame: Any) -> tuple[Any, ...] | None:
    """Return the arguments of the checkpointed region whose inputs are being saved; None if it is something else.

    Args:
        frame: the pack hook's.

    A pack hook is called by the code that saves. While a non-reentrant region runs, its own hooks cover these, so what
    is saved right below `checkpoint` is its inputs; a reentrant one saves them as an autograd function.
    """
    if frame.f_back is not None and frame.f_back.f_code is _APPLY:
        names = frame.f_back.f_locals
        if names.get("cls") is torch_checkpoint.CheckpointFunction:
            return names["args"]
    for _ in range(_NEAR_FRAMES):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_code is _GENERATOR:
            return frame.f_locals["args"]
    return None


def _check_torch() -> None:
    """Try on a number whether inputs of checkpointed regions can be told from other saved tensors.

    Raises:
        TrainingError: they cannot, in this version of torch.
    """
    seen: list[bool] = []
    checkpoint: Any = torch_checkpoint.checkpoint

    def pack(tensor: Tensor) -> Tensor:
        seen.append(_region(sys._getframe()) is not None)
        return tensor

    def trial(run: Callable[[Tensor], Any]) -> set[bool]:
        seen.clear()
        run(torch.zeros(1, device="cpu", requires_grad=True))
        return set(seen)

    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        plain = trial(torch.sin)
        regions = [
            trial(lambda x, way=way: checkpoint(torch.sin, x, use_reentrant=way, preserve_rng_state=False))
            for way in (True, False)
        ]
    if plain != {False} or regions != [{True}, {True}]:
        raise TrainingError(
            f"torch {torch.__version__} saves the inputs of checkpointed regions in a way that offload_checkpoints "
            "does not know; use another version of torch, or train without it."
        )


def _modified(shape: torch.Size) -> TrainingError:
    return TrainingError(
        f"A tensor of shape {list(shape)} that backward needs has been modified by an inplace operation since forward."
    )
