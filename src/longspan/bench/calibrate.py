"""Measure what plans need to know about a machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.schedule import Schedule
from longspan.bench.clock import largest, median, rounds_ms
from longspan.errors import KernelError
from longspan.kernels.protocol import Request, Score
from longspan.kernels.select import available, pick
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Mesh
from longspan.plan.library import find_machine, machine_of
from longspan.plan.machine import KernelRate, Machine

_TIMES = 7
_KERNELS = ("fa4", "cudnn", "fa3", "aten-flash", "fa2", "cpu")


class Rates:
    """Rates of one process's device, all processes at work: the slowest of them counts. On CPUs little is measured."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the median seconds of the slowest process."""
        return largest(1e-3 * median(rounds_ms(work, _TIMES, 2, self.device), 6), self.device)

    def gemm_tflops(self) -> float:
        """Multiply as layers do: many tokens with square weights."""
        tokens, width = (16384, 4096) if self.on_gpu else (1024, 1024)
        a, b = self._normal(tokens, width), self._normal(width, width)
        return 2 * tokens * width * width / self.seconds(lambda: a @ b) / 1e12

    def memory_gbs(self) -> float:
        """Add two tensors into a third."""
        a = self._normal(1 << (28 if self.on_gpu else 22))
        out = torch.empty_like(a)
        return 3 * a.nbytes / self.seconds(lambda: torch.add(a, a, out=out)) / 1e9

    def host_gbs(self) -> float:
        """Copy to pinned host memory and back; the slower way counts."""
        on_device = self._normal(1 << (28 if self.on_gpu else 22))
        on_host = torch.empty_like(on_device, device="cpu", pin_memory=self.on_gpu)
        away = self.seconds(lambda: on_host.copy_(on_device, non_blocking=True))
        back = self.seconds(lambda: on_device.copy_(on_host, non_blocking=True))
        return on_host.nbytes / max(away, back) / 1e9

    def link_gbs(self) -> float | None:
        """Exchange all to all; None for one process."""
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size == 1:
            return None
        sent = self._normal(size << (27 if self.on_gpu else 20))
        got = torch.empty_like(sent)
        seconds = self.seconds(lambda: dist.all_to_all_single(got, sent))
        return sent.nbytes * (size - 1) / size / seconds / 1e9

    def kernels(self) -> tuple[KernelRate, ...]:
        """Attend on one long causal row with every kernel that can; what `auto` takes comes first.

        Raises:
            KernelError: none can.
        """
        request = Request(self.device, self.dtype, 128, 128)
        first = pick("auto", request).name.split("+")[0]
        usable = [name for name, why in available(self.device).items() if why is None and name in _KERNELS]
        found = []
        for name in sorted(usable, key=lambda name: (name != first, _KERNELS.index(name))):
            try:
                kernel = pick(name, request)
            except KernelError:
                continue  # installed, but not for this device
            found.append(KernelRate(name, *self._attention_tflops(kernel)))
        return tuple(found)

    def _attention_tflops(self, kernel: Any) -> tuple[float, float]:
        tokens, heads, kv_heads = (32768, 16, 4) if self.on_gpu else (512, 4, 2)
        layout = Layout(tokens, 1, 1)
        schedule = Schedule.of(Mask(layout.length, None), layout, 0, "ring")
        attend = Attend(Mesh(device_type=self.device.type), kernel)
        q, k, v = (self._normal(1, tokens, n, 128).requires_grad_() for n in (heads, kv_heads, kv_heads))
        dout = torch.randn_like(q)

        def forward() -> Tensor:
            return attend(q, k, v, schedule, Score(128**-0.5))

        def ahead() -> None:
            with torch.no_grad():
                forward()

        forward_s = self.seconds(ahead)
        both_s = self.seconds(lambda: torch.autograd.grad(forward(), (q, k, v), dout))
        flops = 4.0 * heads * 128 * tokens * tokens / 2 / 1e12
        return flops / forward_s, 2.5 * flops / max(both_s - forward_s, 1e-9)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def measured(kind: str, device: torch.device) -> Machine:
    """Measure this host's devices; every process calls it and gets its own result, of which the first counts.

    What cannot be measured here is taken from the machine of that kind that is known, or from an H100: the network, the
    link of one process alone, and of a device that is not known the peak, which then is what products reach.

    Args:
        kind: the name that it gets.
    """
    rates = Rates(device)
    name = torch.cuda.get_device_name(device) if rates.on_gpu else "cpu"
    known = machine_of(name) if rates.on_gpu else find_machine("cpu")
    like = known or find_machine("h100-80g")
    gemm = rates.gemm_tflops()
    link = rates.link_gbs()
    return replace(
        like,
        name=kind,
        names=(name,) if rates.on_gpu else (),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if rates.on_gpu else like.memory_bytes,
        peak_tflops=like.peak_tflops if known and like.peak_tflops > gemm else gemm,
        gemm_tflops=gemm,
        memory_gbs=rates.memory_gbs(),
        host_gbs=rates.host_gbs(),
        link_gbs=link or like.link_gbs,
        kernels=rates.kernels(),
        source=f"measured {time.strftime('%Y-%m-%d')} with torch {torch.__version__}",
    )
