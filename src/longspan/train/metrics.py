"""Measure a step: what is written to metrics.jsonl, and the arithmetic behind MFU."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from longspan.integrations.multimodal import sight_of
from longspan.integrations.shapes import attention_sizes, expert_counts, layer_window
from longspan.mesh import Mesh
from longspan.plan.library import machine_of
from longspan.stream.quantized import packed_size


@dataclass(frozen=True)
class Row:
    """One optimizer step.

    Args:
        loss: mean over the step's targets, the same on every rank.
        grad_norm: global, before clipping.
        tokens: of all replicas, each once, padding not counted.
        mfu: model FLOPs (causal attention, nothing recomputed) over what the GPUs could do in bf16; None where the
            peak or the model's count is unknown.
        mfu_full: the same, with attention counted as if nothing were masked, as some papers do.
        peak_gpu_bytes, peak_host_bytes: largest over the ranks, since the start of the run; the host's since that of
            the process, which knows no other.
        gpu_bytes: peak within the step; host_bytes: resident at its end; the largest over the ranks.
        step_s: from asking for the step's data to the end of its optimizer; the next one's data is read within it.
        data_s, forward_s, backward_s, reduce_s, optimizer_s, other_s: of the first process; they add up to step_s.
            Gradients that the engine reduces inside backward count there.
        exchange_s: inside forward and backward of the first process, how long compute waited for what other ranks of
            its sequence send.
        skipped: the loss or the norm was not finite, and the step has been left out.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    mfu_full: float | None
    peak_gpu_bytes: int
    peak_host_bytes: int
    gpu_bytes: int
    host_bytes: int
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    reduce_s: float
    optimizer_s: float
    other_s: float
    exchange_s: float
    skipped: bool = False

    @property
    def exchange_share(self) -> float:
        """Share of the step that compute waited for exchanges."""
        return self.exchange_s / self.step_s


PHASES = ("data", "forward", "backward", "reduce", "optimizer", "other")
"""What the seconds of a step are divided into."""


class MetricsFile:
    """Append rows to metrics.jsonl; the file and its folder appear with the first row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = False

    def go_on(self, step: int) -> None:
        """Keep the rows of an earlier run up to a step, and append to them; stderr hears of lines that are no rows."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        numbers = [_step_of(line) for line in lines]
        if lost := numbers.count(None):
            print(f"longspan: {self._path}: {lost} lines that cannot be read are dropped", file=sys.stderr)
        partial = self._path.with_name(f".{self._path.name}.partial")
        rows = zip(lines, numbers, strict=True)
        partial.write_bytes(b"".join(line for line, number in rows if number is not None and number <= step))
        partial.replace(self._path)
        self._started = True

    def write(self, row: Row) -> None:
        """Write one row, so that a reader never sees half of it; of a skipped step, what is not finite is null."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a" if self._started else "w", encoding="utf-8") as file:
            plain = asdict(row)
            if row.skipped:
                plain |= {name: None for name in ("loss", "grad_norm") if not math.isfinite(plain[name])}
            else:
                del plain["skipped"]
            file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._started = True


def _step_of(line: bytes) -> int | None:
    """Return the step of a row; None where it is not whole, as a machine that goes down may leave it."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) and line.endswith(b"\n") else None


@dataclass(frozen=True)
class Work:
    """What a model computes per token and per pair of tokens.

    Args:
        parameters: weights that a token is multiplied with, embedding look-ups left out, chosen experts only.
        frozen: those of them that get no gradient.
        attention_width: sum over layers of heads x (query width + value width).
        windows: for windows in tokens, the same sum over the layers that see so many; they are not in attention_width.
    """

    parameters: int
    attention_width: int
    frozen: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def flops(self, documents_tokens: Sequence[int], masked: bool = True) -> float:
        """Count forward and backward of these documents: 6 per weight and token, 4 if it is frozen, and attention to
        what is visible.

        Args:
            masked: False counts attention from every token of a document to every other, whatever masks hide.
        """
        tokens = sum(documents_tokens)
        if not masked:
            width = self.attention_width + sum(width for _, width in self.windows)
            attention = width * float(sum(n * n for n in documents_tokens))
        else:
            attention = self.attention_width * sum(n * n for n in documents_tokens) / 2
            for window, width in self.windows:
                seen = (n * n / 2 if n <= window else window * (n - window / 2) for n in documents_tokens)
                attention += width * sum(seen)
        return (6.0 * self.parameters - 2.0 * self.frozen) * tokens + 6.0 * attention


def model_work(model: nn.Module, config: Any) -> Work | None:
    """Count a model's work on text; None where its layers are not all full softmax attention. A vision tower's weights
    are left out: they are multiplied with patches, not with tokens.

    Args:
        config: the Hugging Face config of the text model.
    """
    known = ("full_attention", "sliding_attention")
    if any(kind not in known for kind in getattr(config, "layer_types", None) or ()):
        return None
    experts, chosen = expert_counts(config)
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    sight = sight_of(inner)
    seeing = set() if sight is None else {id(parameter) for parameter in sight.tower.parameters()}
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    packed = {id(m._parameters["weight"]): n for m in model.modules() if (n := packed_size(m)[0])}
    parameters = frozen = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in seeing or ".original_module." in name:
            continue
        if id(parameter) in looked_up and not tied:
            continue
        share = (chosen, experts) if ".experts." in name else (1, 1)
        own = packed.get(id(parameter), parameter.numel()) * share[0] // share[1]
        parameters += own
        frozen += 0 if parameter.requires_grad else own
    widths: Counter[int | None] = Counter()
    for i in range(config.num_hidden_layers):
        sizes = attention_sizes(config, i)
        widths[layer_window(config, i)] += sizes.heads * (sizes.head_dim + sizes.v_head_dim)
    windows = tuple((window, width) for window, width in widths.items() if window is not None)
    return Work(parameters, widths[None], frozen, windows)


@lru_cache
def peak_flops(device: torch.device) -> float | None:
    """Return what a GPU can do in bf16, per second; None for a CPU or a GPU that plans do not know."""
    machine = machine_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if machine is None else machine.peak_tflops * 1e12


@dataclass(frozen=True)
class Memory:
    """Bytes that a process holds, or held at most."""

    gpu_bytes: int
    host_bytes: int

    def or_larger(self, other: Memory) -> Memory:
        """Return the larger of each."""
        return Memory(max(self.gpu_bytes, other.gpu_bytes), max(self.host_bytes, other.host_bytes))


def largest_memory(
    device: torch.device, mesh: Mesh, *flags: bool, before: int = 0
) -> tuple[Memory, Memory, tuple[bool, ...]]:
    """Return what a process holds at most, now and in all, the largest over `mesh.world`, and of each flag whether some
    process has set it.

    What a GPU holds now is its peak since PyTorch's record of it was last reset; of a host process, what is resident.

    Args:
        before: the GPU's peak before that.

    Cost: one all-reduce of four numbers and the flags.
    """
    gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    host = psutil.Process().memory_info().rss
    numbers = torch.tensor([gpu, host, max(gpu, before), max(host, peak), *flags], dtype=torch.int64, device=device)
    if mesh.world.group is not None:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=mesh.world.group)
    gpu, host, most, peak, *agreed = numbers.tolist()
    return Memory(gpu, host), Memory(most, peak), tuple(map(bool, agreed))
