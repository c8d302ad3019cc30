"""Bytes of tensors on a device whose allocator keeps no account of them, such as a CPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter


class TrackedBytes(TorchDispatchMode):
    """Adds up the memory of all tensors there are, and of those that operations return while it is on.

    Memory is counted once however many tensors share it, until it is freed. What operations use inside and free again
    is not seen.

    Cost: a look at every object of the process first, then at what each operation returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: dict[int, int] = {}
        gc.collect()
        for value in gc.get_objects():
            if issubclass(type(value), Tensor):
                self._add(value)

    def __enter__(self) -> Self:
        resize, known = torch.UntypedStorage.resize_, self._known

        def watched(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            """Engines free parameters that they have gathered by resizing them to nothing."""
            resize(storage, size)
            if storage._cdata in known:
                self._count(storage._cdata, storage.nbytes())
            return storage

        self._patch = patch.object(torch.UntypedStorage, "resize_", watched)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns; tensors made of tensors first take it apart."""
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._add(value)
        return result

    def _add(self, tensor: Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = 0
            self._count(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._drop, storage._cdata).atexit = False

    def _count(self, key: int, size: int) -> None:
        self.held += size - self._known[key]
        self._known[key] = size
        self.peak = max(self.peak, self.held)

    def _drop(self, key: int) -> None:
        self.held -= self._known.pop(key)
