"""What a run needs to go on as if it had never stopped: weights, optimizer state and random numbers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from longspan.agreement import Agreement
from longspan.engines import Zero
from longspan.errors import TrainingError
from longspan.optim.saved import empty_state, own_state, saved_state
from longspan.optim.stepping import Stepping
from longspan.train.writing import Writing

_ENGINE = "engine"

_UNREAD = (
    "It is of another model or optimizer, or damaged: remove it to go on from the one before, or begin anew in another "
    "output_dir."
)

# What tables of tensors are made of; not BytesStorageMetadata, whose values torch unpickles whatever they hold.
_PARTS = {("torch", "Size"), ("torch.serialization", "_get_layout")}
_PARTS |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
_PARTS |= {(home, "PosixPath") for home in ("pathlib", "pathlib._local")}
_PARTS |= {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    )
}


def write_state(
    folder: Path,
    model: nn.Module,
    engine: Any,
    stepping: Stepping,
    device: torch.device,
    agree: Agreement,
    *,
    background: bool = False,
) -> Writing:
    """Begin to write this process's part of a checkpoint. Collective.

    Args:
        background: see `Writing`; DeepSpeed's engines write all of theirs here and now.

    Cost: a copy on the host of what this process writes, in the background all of it, else a tensor at a time.
    """
    zero = isinstance(engine, Zero)
    if zero:
        engine.save(folder / _ENGINE, {})

    def state() -> dict[str, Tensor]:
        return _numbers(device) | ({} if zero else _trained(model, stepping))

    return Writing(folder, state, agree, background=background and not zero)


def read_state(folder: Path, model: nn.Module, engine: Any, stepping: Stepping, device: torch.device) -> None:
    """Read a checkpoint, also one of another number of processes, degrees or way to divide parameters. Collective.

    Random numbers go on as they would have where there are as many processes; else each takes those of one that was.

    Raises:
        TrainingError: it is of another model or optimizer, or damaged.
    """
    agree = Agreement(f"read checkpoint {folder}", _UNREAD)
    reader, zero = _Reader(str(folder)), isinstance(engine, Zero)
    state: dict[str, Tensor] = {}
    agree(lambda: state.update(_vessels(reader, model, None if zero else stepping, device)))
    if zero:
        engine.load(folder / _ENGINE)
    try:
        load(cast(dict[str, Any], state), storage_reader=reader)
    except TrainingError:
        raise
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        cause = causes[0][0] if causes else error
        said = f"Checkpoint {folder} cannot be read ({type(cause).__name__}: {str(cause)[:300]}). {_UNREAD}"
        raise TrainingError(said) from error
    agree(lambda: _take(state, model, None if zero else stepping, device))


def _trained(model: nn.Module, stepping: Stepping) -> dict[str, Tensor]:
    """Return all that training moves, but for random numbers."""
    return _weights(model) | _optimizer(model, stepping.optimizer, None) | stepping.carried()


def _vessels(reader: _Reader, model: nn.Module, stepping: Stepping | None, device: torch.device) -> dict[str, Tensor]:
    """Return tensors for a checkpoint to be read into.

    Args:
        stepping: None where the engine reads all but random numbers.
    """
    known = reader.read_metadata().state_dict_metadata
    rank = dist.get_rank() if dist.is_initialized() else 0
    saved = sum(name.endswith(".cpu") and name.startswith("random.") for name in known)
    numbers = {n: t for n, t in _numbers(device, rank % max(1, saved)).items() if n in known}
    if stepping is None:
        return numbers
    held = {n: t for n, t in _optimizer(model, stepping.optimizer, empty_state).items() if n in known}
    carried = {
        name: torch.zeros((), dtype=entry.properties.dtype, device=device)
        for name, entry in known.items()
        if name.startswith("stepping.") and isinstance(entry, TensorStorageMetadata)
    }
    return numbers | _weights(model) | held | carried


def _take(state: dict[str, Tensor], model: nn.Module, stepping: Stepping | None, device: torch.device) -> None:
    """Go on from what has been read; weights have been read in place."""
    if stepping is not None:
        _give(model, stepping.optimizer, {n: t for n, t in state.items() if n.startswith("optimizer.")})
        stepping.carry({n: t for n, t in state.items() if n.startswith("stepping.")})
    set_numbers(device, [state[name] for name in sorted(state) if name.startswith("random.")])


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained of a model, each tensor once, and its buffers; the rest is as it was built."""
    trained = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    kept = {name for name, value in model.state_dict(keep_vars=True).items() if not isinstance(value, nn.Parameter)}
    return trained | {f"model.{name}": b for name, b in model.named_buffers() if name in kept}


def _optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, empty: Callable[[Any, nn.Parameter], Any] | None
) -> dict[str, Tensor]:
    """Return the states of an optimizer by the names of its parameters.

    Args:
        empty: makes a state to be filled; None for the states as they are.
    """
    packed = optimizer.state_dict()["state"] if empty is None else {}
    found = {}
    for index, (name, parameter) in enumerate(_stepped(model, optimizer)):
        state = saved_state(packed.get(index, {})) if empty is None else empty(optimizer, parameter)
        found |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return found


def _give(model: nn.Module, optimizer: torch.optim.Optimizer, held: dict[str, Tensor]) -> None:
    """Hand states by name to an optimizer."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in held.items():
        owner, _, own = key.rpartition(".")
        states.setdefault(owner, {})[own] = tensor
    packed = optimizer.state_dict()
    for index, (name, parameter) in enumerate(_stepped(model, optimizer)):
        if state := states.get(f"optimizer.{name}"):  # a parameter that never had a gradient has none
            packed["state"][index] = own_state(optimizer, parameter, state)
    optimizer.load_state_dict(packed)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return an optimizer's parameters in its order, with their names."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def numbers(device: torch.device) -> list[Tensor]:
    """Return the states of this process's generators, for `set_numbers`."""
    return list(_numbers(device).values())


def set_numbers(device: torch.device, states: list[Tensor]) -> None:
    """Have random numbers go on from states: the host's, then the device's if it has its own."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _numbers(device: torch.device, rank: int | None = None) -> dict[str, Tensor]:
    """Return the states of a process's generators by the names they are saved under."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"random.{rank}.device"] = torch.cuda.get_rng_state(device)
    return states


class _Reader(FileSystemReader):
    """Reads a checkpoint's table without running what a pickle may contain."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of all tensors.

        Raises:
            TrainingError: it names something else, which would be unpickled.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            table: Metadata = _Table(file).load()
        for name, entry in table.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise TrainingError(
                    f"The checkpoint's table says that {name} is a {type(entry).__name__} where all are tensors: it is "
                    "not loaded. Remove the checkpoint to go on from the one before."
                )
        table.storage_meta = table.storage_meta or StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class _Table(pickle.Unpickler):
    """Makes what tables of torch's checkpoints are made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a table.

        Raises:
            TrainingError: it is none.
        """
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." not in name and (dtype or (module, name) in _PARTS):  # a dotted name reaches what a module imports
            return super().find_class(module, name)
        raise TrainingError(
            f"The checkpoint's table holds {module}.{name}, which no checkpoint does: it is not loaded."
        )
