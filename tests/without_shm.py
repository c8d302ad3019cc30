"""DeepSpeed on CPUs compiles its communication over shared memory when first used: minutes, under a lock that a killed
process leaves behind for all others. Tests go without it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "deepspeed.comm.torch"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as others do, and changes it once it is there."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            module.build_shm_op = lambda: None

        loader.exec_module = run_and_change
        return spec


def leave_out() -> None:
    """Have this process's DeepSpeed compile nothing to communicate. Cost: nothing before DeepSpeed is imported."""
    assert _MODULE not in sys.modules, "DeepSpeed was imported before"
    sys.meta_path.insert(0, _Finder())
