"""`memory="auto"`: what the layers of a prepared model keep, decided for each length of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from longspan import weights
from longspan.errors import ConfigError
from longspan.integrations.shapes import model_shape
from longspan.keep import Budget, Keep, Memory
from longspan.mesh import Mesh
from longspan.once import tell
from longspan.plan.decide import Task, plan_of
from longspan.plan.degrees import Degrees
from longspan.plan.kept import Operands
from longspan.plan.library import find_machine, machine_of
from longspan.plan.machine import Cluster, Machine
from longspan.plan.memory import MOVING_BYTES, Ledger
from longspan.plan.plan import Plan, describe
from longspan.plan.runs import Costs
from longspan.plan.setup import Optimizer, Setup, find_optimizer
from longspan.plan.shapes import ModelShape
from longspan.plan.solve import Choice, forced
from longspan.stream.quantized import packed_size, quantised

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Place:
    """Where a model runs, as all ranks agreed.

    Args:
        device_bytes: memory of the smallest device.
        host_bytes: memory of the smallest node.
        node_ranks: ranks of a node.
    """

    machine: Machine
    device_bytes: int
    host_bytes: int
    node_ranks: int

    @classmethod
    def agreed(cls, device: torch.device, mesh: Mesh) -> Place:
        """Look at this process's device and node, and take the smallest of all ranks.

        All take the first one's figures of the machine, as files of a user's own may differ between hosts.

        Cost: one all-reduce of two numbers, and one broadcast of the figures, over the world axis.
        """
        seen = cls.seen(device, mesh)
        if mesh.world.size == 1:
            return seen
        both = torch.tensor([seen.device_bytes, seen.host_bytes], device=mesh.device_type)
        dist.all_reduce(both, dist.ReduceOp.MIN, group=mesh.world.group)
        own, host = both.tolist()
        machine = [seen.machine]
        dist.broadcast_object_list(machine, group=mesh.world.group, group_src=0)
        return replace(seen, machine=machine[0], device_bytes=own, host_bytes=host)

    @classmethod
    def seen(cls, device: torch.device, mesh: Mesh) -> Place:
        """Look at this process's device and node alone."""
        on_gpu = device.type == "cuda"
        ranks = min(mesh.world.size, torch.cuda.device_count()) if on_gpu else mesh.world.size
        host = host_bytes(psutil.virtual_memory().available if on_gpu else psutil.virtual_memory().total)
        own = torch.cuda.get_device_properties(device).total_memory if on_gpu else host // ranks
        return cls(_machine(device), own, host, ranks)


@dataclass
class Automatic:
    """Decides once per number of rows, length and way in which parameters are held.

    Everything it looks at is equal on all ranks, so their decisions are too.

    Args:
        operands: sizes of each layer's attention call.
        base: the plan without a length.
        backend: what full tiles are compiled with; None to run them as they are.
        streams_norm: whether the norm after the layers can run in tiles.
        recurrence_bytes: of the model's recurrences in backward, per number of their operands.
        optimizer: bytes of the optimizer per weight; None for that of `kind`.
        engine: who holds parameters; None for one that divides all it can, or nothing.
        kind: the optimizer by name; states are in the type of what is trained where it does not say otherwise.
        in_backward: whether it steps inside backward.
    """

    place: Place
    mesh: Mesh
    operands: Sequence[Operands]
    base: Plan
    backend: str | None
    streams_norm: bool
    recurrence_bytes: int
    optimizer: Optimizer | None = None
    engine: str | None = None
    kind: str = "adamw"
    in_backward: bool = False
    plans: dict[tuple[int, int, bool], Plan] = field(default_factory=dict)
    tasks: dict[bool, Task] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    @classmethod
    def agreed(cls, handle: Any) -> Automatic:
        """Decide for a prepared model's device and mesh; full tiles are compiled on CUDA. Cost: as `Place.agreed`."""
        device = handle.parts.device
        return cls._of(handle, Place.agreed(device, handle.mesh), "inductor" if device.type == "cuda" else None)

    @classmethod
    def alone(cls, handle: Any, device: torch.device) -> Automatic:
        """Plan for what this process sees, without asking the others, a model that was prepared without a plan."""
        return cls._of(handle, Place.seen(device, handle.mesh), None)

    @classmethod
    def _of(cls, handle: Any, place: Place, backend: str | None) -> Automatic:
        streams_norm, held_bytes = handle.parts.norm is not None, handle.recurrent.rule.held_bytes
        return cls(place, handle.mesh, handle.operands, handle.plan, backend, streams_norm, held_bytes)

    def expect(self, kind: str, in_backward: bool = False) -> None:
        """Plan for another optimizer than AdamW beside the parameters, from the next batch on.

        Args:
            kind: its name in `longspan.plan.setup.OPTIMIZERS`.

        Raises:
            ConfigError: there is none of that name.
        """
        find_optimizer(kind)
        self.kind, self.in_backward = kind, in_backward
        self._forget()

    def held_by(self, engine: str, optimizer: Optimizer) -> None:
        """Plan for an engine that holds other bytes of a parameter than the model shows, from the next batch on.

        Args:
            engine: its name in `longspan.plan.setup.ENGINES`.
            optimizer: all that it holds of a parameter, before dividing.
        """
        self.engine, self.optimizer = engine, optimizer
        self._forget()

    def _forget(self) -> None:
        self.plans.clear()
        self.tasks.clear()

    def plan(self, model: nn.Module, rows: int, tokens: int) -> Plan:
        """Return the plan for rows of so many tokens, and say so the first time that layers run in a new way.

        Raises:
            ConfigError: nothing fits, with the numbers.
        """
        sharded = _sharded(model)
        key = (rows, tokens, sharded)
        if key not in self.plans:
            self.plans[key] = self._decide(self._task(model, sharded), rows, tokens)
            self._tell(self.plans[key])
        return self.plans[key]

    def task(self, model: nn.Module) -> Task:
        """Return what plans are made for, all but rows and their length."""
        return self._task(model, _sharded(model))

    def _task(self, model: nn.Module, sharded: bool) -> Task:
        if sharded not in self.tasks:
            place, world = self.place, self.mesh.world.size
            cluster = Cluster(place.machine, world, place.node_ranks, place.device_bytes, place.host_bytes)
            degrees = Degrees(self.base.ulysses_degree, self.base.ring_degree, self.base.reasons[0])
            shape = model_shape(model, self.operands)
            trained = max((p.element_size() for p in model.parameters() if p.requires_grad), default=4)
            optimizer = self.optimizer or Optimizer.held(
                self.kind, trained, _weight_bytes(model, shape), self.in_backward
            )
            self.tasks[sharded] = Task(
                shape,
                cluster,
                degrees,
                self.engine or ("fsdp2" if sharded else "ddp"),
                (optimizer,),
                self.base.kernel,
                itemsize=2 if place.machine.on_gpu else trained,
                compiles=self.backend is not None,
                # ranks with other batches may see other lengths, and gathering must happen on all of them or none
                rebuilds=not sharded or self.mesh.data.size == 1,
                settled=True,
                streams_norm=self.streams_norm,
                recurrence_bytes=self.recurrence_bytes,
            )
        return self.tasks[sharded]

    def _decide(self, task: Task, rows: int, tokens: int) -> Plan:
        task = replace(task, rows=rows)
        if not task.cluster.machine.on_gpu and _plain_fits(next(task.setups(tokens, task.optimizers[0]))):
            return replace(self.base, seq_len=tokens, level="graph", memory=Memory())
        choice = task.choose(tokens)
        if choice is None:
            error = task.too_long(tokens)
            raise ConfigError(f"{error} To try all the same, pass prepare(..., memory=longspan.Memory(...)).")
        made = plan_of(task, choice, None)
        memory = replace(choice.memory, budget=self._budget(choice))
        if memory.compile is not None:
            memory = replace(memory, compile=self.backend)
        reasons = (*self.base.reasons, *made.reasons[1:])
        return replace(made, kernel=self.base.kernel, loss=self.base.loss, reasons=reasons, memory=memory)

    def _budget(self, choice: Choice) -> Budget:
        """Return a choice's budget with room on the host that no length changes, so that it is reserved once."""
        host = max(0, int(Ledger(choice.setup).host_capacity))
        gpu = choice.budget.gpu_bytes
        if not host:
            return choice.budget
        moving = choice.budget.moving_bytes or MOVING_BYTES
        return Budget(self.place.device_bytes if gpu is None else gpu, host, moving_bytes=moving)

    def _tell(self, plan: Plan) -> None:
        """Print a decision on the first rank, once for each way in which layers run."""
        assert plan.memory is not None
        way = describe(plan.memory)
        if way in self.told or plan.memory == Memory():
            return
        self.told.add(way)
        lines = plan.explain().splitlines()[1:]
        tell("\n".join(["longspan:" + lines[0].removeprefix(" "), *lines[1:]]))


def _sharded(model: nn.Module) -> bool:
    return any(map(weights.sharded, model.parameters()))


def _weight_bytes(model: nn.Module, shape: ModelShape) -> float:
    """Return the bytes per weight of a model, packed weights as they are packed."""
    packed = sum(packed_size(module)[1] for module in model.modules())
    plain = {id(p): p for m in model.modules() if not quantised(m) for p in m.parameters(recurse=False)}
    return (packed + sum(weights.whole_shape(p).numel() * p.element_size() for p in plain.values())) / shape.parameters


def _plain_fits(setup: Setup) -> bool:
    """Tell whether layers fit as they are, with all their activations."""
    setup = replace(setup, tile_tokens=None, compiled=False)
    choice = forced(Costs(setup), Keep.GRAPH)
    return sum(choice.gpu_bytes.values()) <= Ledger(setup).capacity + Ledger(setup).reserve


def _machine(device: torch.device) -> Machine:
    """Return the figures of a device; those of an H100, and a word about it, where its kind is not known."""
    if device.type != "cuda":
        return find_machine("cpu")
    name = torch.cuda.get_device_name(device)
    known = machine_of(name)
    if known is None:
        tell(f"longspan: no figures for {name}: planned as an H100; `longspan plan --calibrate` measures it")
    return known or find_machine("h100-80g")


def host_bytes(seen: int) -> int:
    """Return how much of the host a process may use: what was seen, or less in a container."""
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            return min(seen, int(text))
    return seen
