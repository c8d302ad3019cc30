"""The gated delta rule of flash-linear-attention."""

from __future__ import annotations

import re
from importlib import import_module, metadata

import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.kernels.cuda import device_problem, import_problem, load
from longspan.plan.setup import RECURRENCE_BYTES
from longspan.recurrent.rule import Operands
from longspan.recurrent.stretch import Stretch

_MODULE, _PACKAGE = "fla.ops.gated_delta_rule", "flash-linear-attention"
_OLDEST = (0, 5, 2)
_WRONG_FROM, _RIGHT_FROM = (3, 4), (3, 7, 1)  # versions of Triton
_LARGEST_HEAD_DIM = 256


class FlaRule:
    """`chunk_gated_delta_rule`, with one segment per document.

    Source: flash-linear-attention 0.5.2; earlier ones have wrong gradients where states are passed on.
    """

    name = "fla"
    held_bytes = RECURRENCE_BYTES

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this rule cannot run on a device, forward and backward, or None."""
        if why := device_problem(device) or import_problem(_MODULE, _PACKAGE):
            return why
        found = metadata.version(_PACKAGE)
        if _numbers(found) < _OLDEST:
            return f"it needs {_PACKAGE} {'.'.join(map(str, _OLDEST))}, {found} is installed"
        return _backward_problem(device)

    def outputs(self, operands: Operands, stretch: Stretch, state: Tensor | None) -> Tensor:
        """See `Rule.outputs`."""
        batch, first = operands.v.shape[0], None
        if state is not None:
            starts = state * (stretch.entering >= 0)[:, None, None, None]
            first = state.new_zeros(len(stretch.borders) - 1, *state.shape[1:])
            first = first.index_copy(0, stretch.first_runs, starts)
        flat = Operands(*(t.flatten(0, 1)[None] for t in _listed(operands)))
        out, _ = self._call(flat, first, stretch.cu_seqlens, final=False)
        return out[0].unflatten(0, (batch, -1))

    def transition(self, operands: Operands, stretch: Stretch) -> Tensor:
        """See `Rule.transition`. Cost: the rule over the last document alone, with values as wide again."""
        beside, unit = operands.beside_unit()
        last = Operands(*(stretch.last_tokens(t) for t in _listed(beside)))
        _, left = self._call(last, unit * stretch.passes[:, None, None, None], stretch.last_cu_seqlens, final=True)
        return left

    def _call(self, flat: Operands, first: Tensor | None, cu_seqlens: Tensor, final: bool) -> tuple[Tensor, Tensor]:
        dtype, width = flat.v.dtype, flat.k.shape[-1]
        if dtype not in (torch.bfloat16, torch.float16) or width > _LARGEST_HEAD_DIM:
            raise KernelError(
                f"The gated delta rule of {_PACKAGE} computes in bf16 and fp16 with key heads of up to "
                f"{_LARGEST_HEAD_DIM}, not in {str(dtype).removeprefix('torch.')} with {width}. Train under bf16 "
                "autocast or with bf16 weights, or prepare with kernel='reference'."
            )
        rule = load(_MODULE, _PACKAGE).chunk_gated_delta_rule
        return rule(
            q=flat.q,
            k=flat.k,
            v=flat.v,
            g=flat.g,
            beta=flat.beta,
            initial_state=first,
            output_final_state=final,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )


def _backward_problem(device: torch.device) -> str | None:
    """Say why the library would raise in its backward on a device, or None.

    Some versions of Triton compile one of its kernels wrongly for Hopper. It raises when that is called, which is after
    a first forward and minutes of compiling, unless TileLang is there to take its place.

    Source: fla/ops/common/chunk_o.py and its TileLang backend, in 0.5.2 and 0.6.0.
    """
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    found = import_module("triton").__version__
    if not _WRONG_FROM <= _numbers(found) < _RIGHT_FROM or _tilelang():
        return None
    return (
        f"Triton {found} compiles the backward of {_PACKAGE} wrongly for this GPU (Hopper); it needs Triton "
        f"{'.'.join(map(str, _RIGHT_FROM))} or later, or tilelang and nvcc"
    )


def _tilelang() -> bool:
    """Whether the library hands that kernel to TileLang: installed, with a compiler, and not switched off."""
    try:
        backend = import_module("fla.ops.common.backends.tilelang").TileLangBackend()
        return bool(backend.is_available() and backend.is_enabled())
    except (ImportError, AttributeError):  # a version that keeps it elsewhere: slowly is safe, and is told
        return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def _listed(operands: Operands) -> tuple[Tensor, ...]:
    return operands.q, operands.k, operands.v, operands.g, operands.beta
