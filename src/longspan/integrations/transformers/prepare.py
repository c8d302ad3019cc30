"""`longspan.prepare`: decide, check, and make a model sequence parallel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longspan.attention.build import Attend
from longspan.attention.call import Kind
from longspan.comm.heads import HeadSplit
from longspan.comm.symmetric import with_copy_engine
from longspan.errors import ConfigError, KernelError, ModelError, TopologyError
from longspan.integrations.refusals import refuse_settings
from longspan.integrations.transformers.applied import Applied
from longspan.integrations.transformers.attention import NAME, register
from longspan.integrations.transformers.automatic import Automatic
from longspan.integrations.transformers.config import own_config, use_attention
from longspan.integrations.transformers.forward import GRADIENT_CHECKPOINTING
from longspan.integrations.transformers.norm import norm_note
from longspan.integrations.transformers.parts import Parts
from longspan.integrations.transformers.probe import Probed, Shape, probe
from longspan.integrations.transformers.routers import ROUTER_LOGITS, Routers
from longspan.integrations.transformers.settled import Settled, settle_together
from longspan.keep import Memory
from longspan.kernels.protocol import Kernel, Request
from longspan.kernels.select import pick
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks
from longspan.once import tell
from longspan.plan.degrees import Degrees, choose_degrees
from longspan.plan.exchange import KV_EXCHANGES, ExchangeRule, KvExchange
from longspan.plan.plan import Plan
from longspan.recurrent.select import divided, pick_rule


def prepare(
    model: nn.Module,
    sequence_parallel_size: int = 1,
    *,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    mesh: DeviceMesh | None = None,
    kernel: str = "auto",
    memory: Literal["auto"] | Memory = "auto",
    logits: bool = False,
    grad_reduction: Literal["mean", "sum"] = "mean",
    sequence_parallel_in_eval: bool = True,
    kv_exchange: KvExchange = "auto",
    device: torch.device | str | None = None,
) -> Applied:
    """Make a transformers causal language model compute on sequences divided over ranks, exactly.

    Call it on every process, after PEFT and before DDP, fully_shard or deepspeed.initialize. `handle.remove()` undoes
    it; calling it again with the same settings returns the handle.

    Args:
        model: the model, on its device, with weights; or without, see `device`.
        sequence_parallel_size: ranks that share a sequence; the other ranks are data parallel.
        ulysses_degree, ring_degree: how these divide into head and ring parallelism; None to choose.
        mesh: a mesh of the host with an axis named `sp` or `cp`; None for all processes.
        kernel: `auto`, one of longspan's kernels, or a transformers attention name.
        memory: how layers run and what they keep; `auto` decides by length, on CPUs to keep all while that fits.
        logits: also return this rank's logits [B, s, V].
        grad_reduction: whether the engine averages gradients over the ranks or adds them up.
        sequence_parallel_in_eval: False makes `model.eval()` run the plain model on full batches.
        kv_exchange: how keys come to other ring ranks: `ring`, `gather`, or `auto`, by batch; `handle.plan` says why.
        device: where the weights of a model on the meta device will be; `longspan.engines.Origin` brings them later.

    Raises:
        ModelError: the model, or a layer of it, is not understood well enough to be exact; names it.
        TopologyError, KernelError: processes or heads cannot serve the degrees, or no kernel the model, on this device.

    Cost: five forward passes on 5 tokens (eight for experts), the process groups, two small collectives; on GPUs of one
        node a quarter of a GiB of each for exchanges of heads by copy engines.
    """
    degrees = (sequence_parallel_size, ulysses_degree, ring_degree)
    settings = (*degrees, kernel, logits, grad_reduction, sequence_parallel_in_eval, memory, str(mesh), kv_exchange)
    _check_choices(settings, mesh)
    parts = Parts.of(model, None if device is None else torch.empty(0, device=device).device)
    if (earlier := getattr(parts.model, "_longspan_applied", None)) is not None:
        return _same(earlier, settings)
    ranks = data_parallel_ranks(sequence_parallel_size, mesh)
    settled = settle_together(lambda: _settle(parts, degrees, kernel, kv_exchange, memory), ranks.numel())
    axes, exchange = with_copy_engine(build_mesh(ranks, settled.degrees, parts.device.type), parts.device)
    plan = _with_notes(settled.plan, *norm_note(parts.norm, settled.ways), exchange, _liger_note(parts.model))
    own_config(model, parts.model.config)
    options: Any = {"logits": logits, "grad_reduction": grad_reduction, "in_eval": sequence_parallel_in_eval}
    applied = _apply(settled, parts, axes, plan, options)
    applied.settings = settings
    if memory == "auto":
        applied.decide(Automatic.agreed(applied))
    tell(f"longspan: {plan.summary()}")
    return applied


def _apply(settled: Settled, parts: Parts, axes: Mesh, plan: Plan, options: Any) -> Applied:
    """Put what was settled in force."""
    attends = {kind: Attend(axes, chosen) for kind, chosen in settled.kernels.items()}
    applied = Applied(parts, axes, plan, attends, settled.ways, **options)
    applied.exchange = settled.exchange
    applied.operands, applied.logit_options = settled.probed.shapes, settled.probed.logits
    return applied


def _settle(
    parts: Parts,
    asked: tuple[int, int | None, int | None],
    kernel: str,
    kv_exchange: KvExchange,
    memory: Literal["auto"] | Memory,
) -> Settled:
    """Look at the model, probe it, and choose what serves every layer.

    Args:
        asked: the sequence-parallel size, the Ulysses and the ring degree.
    """
    _check_model(parts)
    ways = _ways(memory, parts)
    probed, device = _probe(parts), parts.device
    shapes, (size, ulysses, ring) = probed.shapes, asked
    degrees = _degrees(shapes, size, ulysses, ring, _node_size(device))
    chosen, notes = _kernels(kernel, shapes, device)
    names = "+".join(dict.fromkeys(kernel.name for kernel in chosen.values()))
    reasons = (degrees.reason, *notes, *_recurrent_notes(shapes, size, names, device))
    plan = Plan(size, degrees.ulysses, degrees.ring, names, "tiled cross-entropy", reasons)
    rule = _exchange_rule(kv_exchange, shapes, degrees, chosen, device)
    return Settled(ways, probed, degrees, chosen, rule, plan)


def _recurrent_notes(shapes: list[Shape], size: int, kernel: str, device: torch.device) -> list[str]:
    """Say how recurrent layers are divided, and what computes them."""
    heads = sorted({shape.kv_heads for shape in shapes if shape.recurrent})
    if not heads:
        return []
    return [*(divided(count, size) for count in heads), pick_rule(kernel, device)[1]]


def _exchange_rule(
    asked: KvExchange, shapes: list[Shape], degrees: Degrees, chosen: dict[Kind, Kernel], device: torch.device
) -> ExchangeRule:
    """Return how exchanges are decided: by what the layers' heads and kernels allow."""
    splits = [HeadSplit(shape.heads, shape.kv_heads, degrees.ulysses) for shape in shapes if not shape.recurrent]
    fewest = min((len(heads) for split in splits for heads in split.key), default=1)
    refusals = []
    for kind, kernel in chosen.items():
        dtype = _compute_dtype(next(shape.dtype for shape in shapes if shape.kind == kind), device)
        demands = {"varlen": True, "bottom_right": True, "window": kind.window, "softcap": kind.softcap}
        if why := kernel.refuses(Request(device, dtype, kind.head_dim, kind.v_head_dim, **demands)):
            refusals.append(f"kernel '{kernel.name}': {why}")
    return ExchangeRule(asked, fewest, refusals[0] if refusals else None)


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of attention for weights of a dtype: on GPUs, float32 weights are run in bfloat16."""
    return torch.bfloat16 if device.type == "cuda" and dtype == torch.float32 else dtype


def _liger_note(model: nn.Module) -> str | None:
    """Say so where Liger has replaced the model's forward: that has a loss of its own, and no labels reach it."""
    code = getattr(model.forward, "__func__", model.forward)
    if not str(getattr(code, "__module__", "")).startswith("liger_kernel"):
        return None
    return f"Liger's fused loss in {type(model).__name__}.forward is not used, the tiled one is in its place"


def _with_notes(plan: Plan, *notes: str | None) -> Plan:
    return replace(plan, reasons=(*plan.reasons, *(note for note in notes if note)))


def _ways(memory: Literal["auto"] | Memory, parts: Parts) -> Memory:
    ways = Memory() if memory == "auto" else memory
    ways.check_layers(len(parts.layers))
    return ways


def _check_choices(settings: tuple[Any, ...], mesh: Any) -> None:
    """Refuse settings of a wrong type, or that there are none of."""
    size, ulysses, ring, kernel, _, grad_reduction, _, memory, _, kv_exchange = settings
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"sequence_parallel_size must be a whole number of ranks, such as 2, got {size!r}.")
    for name, degree in (("ulysses_degree", ulysses), ("ring_degree", ring)):
        if degree is not None and (not isinstance(degree, int) or isinstance(degree, bool)):
            raise ConfigError(f"{name} must be a whole number of ranks, or None to have it chosen, got {degree!r}.")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch DeviceMesh with an axis 'sp' or 'cp', or None, got {mesh!r}.")
    if not isinstance(kernel, str):
        raise ConfigError(
            f"kernel must be the name of a kernel, or 'auto' to have it chosen, got {kernel!r}; `longspan doctor` "
            "lists those that can run here."
        )
    if memory != "auto" and not isinstance(memory, Memory):
        raise ConfigError(f"memory must be 'auto' or a Memory, got {memory!r}.")
    if grad_reduction not in ("mean", "sum"):
        raise ConfigError(f"grad_reduction must be 'mean' or 'sum', got {grad_reduction!r}.")
    if kv_exchange not in KV_EXCHANGES:
        raise ConfigError(f"kv_exchange must be one of {', '.join(KV_EXCHANGES)}, got {kv_exchange!r}.")


def _same(earlier: Applied, settings: tuple[object, ...]) -> Applied:
    if earlier.settings != settings:
        raise ConfigError(
            f"This model is prepared already, with {earlier.plan.summary()}; call handle.remove() before preparing it "
            "in another way."
        )
    return earlier


def _check_model(parts: Parts) -> None:
    """Refuse settings of the model under which it would not be exact."""
    refuse_settings(parts.model, parts.layers, parts.layers_name)
    if parts.checkpointing:
        raise ModelError(GRADIENT_CHECKPOINTING)
    if getattr(parts.model.config.get_text_config(), ROUTER_LOGITS, False):
        Routers.of(parts).known()


def refuse_unless_exact(model: nn.Module) -> None:
    """Refuse a model that `prepare` would refuse, whatever the degrees and kernels.

    Raises:
        ModelError: names the layer, or the setting.

    Cost: five forward passes on 5 tokens.
    """
    parts = Parts.of(model)
    _check_model(parts)
    _probe(parts)


def _probe(parts: Parts) -> Probed:
    """Run the probe under our attention implementation, and put the model's own back."""
    register()
    plain: Any = parts.trunk.config._attn_implementation
    use_attention(parts.trunk, NAME)
    try:
        return probe(parts)
    finally:
        use_attention(parts.trunk, plain)


def _degrees(shapes: list[Shape], size: int, ulysses: int | None, ring: int | None, node_size: int | None) -> Degrees:
    """Choose degrees that serve every layer: layers may differ in their heads."""
    kinds = sorted({(shape.heads, shape.kv_heads) for shape in shapes if not shape.recurrent}) or [(size, size)]
    found = [choose_degrees(h, k, size, node_size, ulysses=ulysses, ring=ring) for h, k in kinds]
    if ulysses is None and ring is None and len({d.ulysses for d in found}) > 1:
        common = min(d.ulysses for d in found)
        if any(h % common for h, _ in kinds):
            raise TopologyError(f"Layers with {kinds} heads share no Ulysses degree; set ulysses_degree by hand.")
        return choose_degrees(*kinds[0], size, node_size, ulysses=common)
    return found[0]


def _node_size(device: torch.device) -> int | None:
    """Return the number of GPUs of this node; ranks on CPUs count as one node."""
    return torch.cuda.device_count() if device.type == "cuda" else None


def _kernels(name: str, shapes: list[Shape], device: torch.device) -> tuple[dict[Kind, Kernel], tuple[str, ...]]:
    """Pick a kernel for each kind of layer.

    Raises:
        KernelError: none, or not the one named, serves a kind; says which layers these are.
    """
    packed, notes = name in ("auto", "sdpa"), []
    picked: dict[Kind, Kernel] = {}
    attending = [i for i, shape in enumerate(shapes) if not shape.recurrent] or range(len(shapes))
    for kind in dict.fromkeys(shapes[i].kind for i in attending):
        layers = [i for i in attending if shapes[i].kind == kind]
        dtype = shapes[layers[0]].dtype
        if name != "reference" and dtype != _compute_dtype(dtype, device):
            dtype, notes = torch.bfloat16, ["fp32 weights: attention expects bf16 from autocast or FSDP2"]
        demands = {"varlen": packed, "window": kind.window, "softcap": kind.softcap}
        try:
            picked[kind] = pick(name, Request(device, dtype, kind.head_dim, kind.v_head_dim, **demands))
        except KernelError as error:
            where = "" if len(layers) == len(shapes) else f"Layers {', '.join(map(str, layers))}: "
            raise KernelError(f"{where}{error}") from None
    return picked, (*_told(shapes, picked), *notes)


def _told(shapes: list[Shape], picked: dict[Kind, Kernel]) -> Iterator[str]:
    """Say what layers ask for besides causal attention, and which kernel serves whom if there are several."""
    names = {kernel.name for kernel in picked.values()}
    asked: dict[tuple[Any, ...], int] = Counter(
        (shape.window, shape.score.softcap, shape.sinks, picked[shape.kind].name)
        for shape in shapes
        if not shape.recurrent
    )
    for (window, softcap, sinks, kernel), count in asked.items():
        words = [f"a window of {window} tokens"] * (window is not None) + [f"softcap {softcap}"] * (softcap is not None)
        words += ["attention sinks"] * sinks
        if words or len(names) > 1:
            by = f" by kernel {kernel}" if len(names) > 1 else ""
            yield f"{count} of {len(shapes)} layers {'with ' + ', '.join(words) if words else 'see everything'}{by}"
