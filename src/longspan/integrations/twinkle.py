"""Sequence parallelism in the manner of Twinkle: a strategy object that makes a model shard its own batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from longspan.batch import CONTEXT, Shard
from longspan.errors import BatchError, ConfigError, ModelError, TopologyError
from longspan.integrations.refusals import head_counts
from longspan.integrations.transformers.applied import Applied
from longspan.integrations.transformers.prepare import prepare


@dataclass(frozen=True)
class SequenceParallelConfig:
    """What `SequenceParallelStrategy` takes as its `sp_config`, also as a mapping of these names.

    Args:
        ulysses_size: ranks that share a sequence, in all: heads are divided gcd(KV heads, ulysses_size) times, a ring
            has the rest. None takes it from the mesh.
        gather_logits: give whole logits back, on every rank.
        enabled: False leaves the model alone.
        ulysses_degree, ring_degree: divide the ranks by hand.
    """

    ulysses_size: int | None = None
    gather_logits: bool = True
    enabled: bool = True
    ulysses_degree: int | None = None
    ring_degree: int | None = None

    @classmethod
    def of(cls, given: SequenceParallelConfig | Mapping[str, Any] | None) -> SequenceParallelConfig:
        """Read settings.

        Raises:
            ConfigError: a name that is unknown, or a size that is no number of ranks.
        """
        if isinstance(given, SequenceParallelConfig):
            return given
        unknown = sorted(set(given or {}) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"sp_config has no setting '{unknown[0]}'; it knows {', '.join(cls.__dataclass_fields__)}."
            )
        return cls(**given or {})

    def __post_init__(self) -> None:
        for name in ("ulysses_size", "ulysses_degree", "ring_degree"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {size!r}.")
        for name in ("gather_logits", "enabled"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}.")


class SequenceParallelStrategy:
    """Make a transformers causal language model divide whole batches over ranks by itself.

    After `initialize()` the model takes whole batches, the same on every rank of a sequence, and returns the global
    loss if there are labels, and logits: whole, unpadded and in order with `gather_logits`, else those of this rank.
    Labels are as transformers takes them, those of the tokens; `shift_labels` are the targets of each position itself.
    All that changes is this model; several strategies serve several models.

    Args:
        device_mesh: a torch DeviceMesh with an axis `sp` or `cp`, or any mesh of all processes in their order, in which
            neighbours share a sequence; None for all processes.
        sp_config: a `SequenceParallelConfig` or a mapping; None takes the size from the mesh.
        model: a causal language model, bare or inside PEFT, before any engine wraps it.
        tokenizer_id: not needed, since padding never has an effect.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        sp_config: SequenceParallelConfig | Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        tokenizer_id: str | None = None,
    ) -> None:
        self.config = SequenceParallelConfig.of(sp_config)
        self.device_mesh, self.model, self.tokenizer_id = device_mesh, model, tokenizer_id
        self.handle: Applied | None = None
        self._made: Any = WeakTensorKeyDictionary()  # logits -> the shard they are of, None for whole ones
        self._since: list[Shard | None] = []  # the last forwards, two at most, since the last postprocess

    @property
    def size(self) -> int:
        """Ranks that share a sequence; 1 if the strategy is not enabled."""
        if not self.config.enabled:
            return 1
        asked, size = self.config.ulysses_size, getattr(self.device_mesh, "ulysses_size", None)
        if asked is None and size is None and isinstance(self.device_mesh, DeviceMesh):
            size = _axis_size(self.device_mesh)
        if asked is not None and size is not None and asked != size:
            raise ConfigError(f"sp_config says ulysses_size {asked}, the device mesh {size}.")
        size = asked if asked is not None else size
        return 1 if size is None else int(size)

    def initialize(self) -> bool:
        """Make the model sequence parallel, on every process; doing so again does nothing.

        Returns:
            Whether sequences are divided.

        Raises:
            ModelError, TopologyError: as `longspan.prepare`.
        """
        size = self.size
        if self.handle is not None or size == 1:
            return size > 1
        if self.model is None:
            raise ModelError("SequenceParallelStrategy needs a model to initialize.")
        ulysses, ring = self.config.ulysses_degree, self.config.ring_degree
        if ulysses is None and ring is None:
            ulysses = math.gcd(head_counts(self.model.config)[1], size)
        mesh = _mesh(self.device_mesh)
        self.handle = prepare(self.model, size, ulysses_degree=ulysses, ring_degree=ring, mesh=mesh, logits=True)
        inner = self.handle.model
        inner.forward = _ShardingForward(self, inner.forward)  # the handle knows the model's own, and gives it back
        return True

    def preprocess_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole batch, which the model takes as well."""
        if self.handle is None:
            self._require_initialized()
            return dict(inputs)
        return self.handle.shard(inputs)

    def postprocess(self, outputs: Any) -> Any:
        """Give outputs of a part from `preprocess_inputs` whole logits, with `gather_logits`; whole ones stay.

        Outputs come in any order, as the model returned them. Those that a wrapper has copied, as for mixed precision,
        come right after their forward. Differentiable: a loss that every rank computes alike from whole logits has the
        gradients of one process, under engines that average them.

        Raises:
            BatchError: copied logits, with no forward since the last call or several.
        """
        since, self._since = self._since, []
        handle, logits = self.handle, _logits(outputs)
        if handle is None or logits is None or not self.config.gather_logits:
            return outputs
        if logits not in self._made and len(since) != 1:
            raise BatchError(
                "These logits are not those that the model returned, but a copy, and the model has run "
                f"{'several times' if since else 'not once'} since the last postprocess: call it right after each "
                "forward, or call strategy.handle.gather(logits, part) with the part they were computed from."
            )
        shard = self._made[logits] if logits in self._made else since[0]
        return outputs if shard is None else self._gathered(outputs, handle.gather(logits, shard))

    postprocess_outputs = postprocess

    def _gathered(self, outputs: Any, whole: Tensor) -> Any:
        """Return outputs with whole logits in place of their own."""
        self._made[whole] = None
        if isinstance(outputs, Tensor):
            return whole
        return type(outputs)(**{**outputs, "logits": whole})

    def _returned(self, outputs: Any, shard: Shard | None) -> Any:
        """Remember what a forward returned: logits of a part, or whole ones."""
        logits = _logits(outputs)
        if logits is not None:
            self._made[logits] = shard
        self._since = [*self._since, shard][-2:]
        return outputs

    def remove(self) -> None:
        """Give the model back as it was."""
        if self.handle is not None:
            self.handle.remove()
        self.handle, self._since = None, []

    def _require_initialized(self) -> None:
        if self.size > 1:
            raise ConfigError("Call initialize() before handing batches to the strategy.")


class _ShardingForward:
    """Stands in for the `forward` of a prepared model: takes whole batches too."""

    def __init__(self, strategy: SequenceParallelStrategy, prepared: Any) -> None:
        self.strategy, self.prepared = strategy, prepared
        functools.update_wrapper(self, prepared)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self.strategy
        handle = strategy.handle
        assert handle is not None
        if handle.bypassed or CONTEXT in kwargs:
            return strategy._returned(self.prepared(*args, **kwargs), kwargs.get(CONTEXT))
        if len(args) > 1 or (args and "input_ids" in kwargs):
            raise BatchError(f"Pass a batch by name; got {len(args)} tensors without one.")
        batch = {**({"input_ids": args[0]} if args else {}), **kwargs}
        part = handle.shard(batch)
        outputs = self.prepared(**part)
        logits = _logits(outputs)
        if logits is not None and strategy.config.gather_logits:
            outputs = strategy._gathered(outputs, handle.gather(logits, part[CONTEXT]))
        return strategy._returned(outputs, None)


def _logits(outputs: Any) -> Tensor | None:
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)


def _axis_size(mesh: DeviceMesh) -> int | None:
    """Return the size of a mesh's sequence axis, if it has one."""
    names = mesh.mesh_dim_names or ()
    return next((mesh.size(names.index(name)) for name in ("sp", "cp") if name in names), None)


def _mesh(mesh: Any) -> DeviceMesh | None:
    """Return a mesh with a sequence axis; None for one whose processes are all of them, in order."""
    if mesh is None or (isinstance(mesh, DeviceMesh) and _axis_size(mesh) is not None):
        return mesh
    ranks = getattr(mesh, "mesh", None)
    if ranks is None:
        raise TopologyError(f"device_mesh must be a mesh of processes or None, got {type(mesh).__name__}.")
    world = dist.get_world_size() if dist.is_initialized() else 1
    found = torch.as_tensor(ranks).flatten().tolist()
    if found != list(range(world)):
        raise TopologyError(
            f"The device mesh holds processes {found[:8]}{' ...' if len(found) > 8 else ''} and has no axis 'sp' or "
            f"'cp'; without one it must hold all {world} in their order."
        )
    return None
