"""Settings of what layers keep from forward to backward, and of where it lies."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ValidationInfo, field_validator, model_validator

from longspan.config.section import Bytes, Section, Size
from longspan.config.section import field as _field
from longspan.keep import Budget, Keep, Memory, parse_keeps


def _line(value: Any) -> Any:
    """Write a list of decisions as one line; one of a single layer with its count, as it is not for all layers."""
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        return value
    return f"{value[0]}*1" if len(value) == 1 and value[0] in tuple(Keep) else ",".join(value)


_SET = ", or set keep, such as keep: x+O"
Keeps = Annotated[str, BeforeValidator(_line)]


class MemoryConfig(Section):
    """What layers keep for backward, and where."""

    keep: Keeps = _field(
        "What a layer keeps from forward to backward: 'auto' what the plan chooses; 'graph' all activations, computing "
        "nothing again; 'products' the outputs of its matrix products (needs compile); 'x+O+KV' its input, attention "
        "output, keys and values; 'x+O' projects keys and values again; 'x' runs attention again too; 'O' and 'none' "
        "are rebuilt from the nearest earlier layer that kept its input. One for all layers, or a list with one for "
        "each, such as x,none*6,x+O*25, where *6 stands for six layers.",
        "auto",
        example="x+O",
    )
    tile_tokens: Size | None = _field(
        "Run a layer on this many tokens of a process at a time; null: all at once, or what the plan chooses. Needs a "
        "keep that runs layers again, or compile.",
        None,
        unit="tokens",
        example="16K",
        ge=1,
    )
    compile: Literal["inductor", "eager"] | None = _field(
        "Compile layers for tiles of tile_tokens: 'inductor' by torch.compile; 'eager' traces them, and runs what it "
        "found as it is; null: not, or what the plan chooses.",
        None,
        example="inductor",
    )
    rebuilt: Keeps = _field(
        "What a layer whose attention was run again, so that later ones could be rebuilt, keeps from then to its own "
        "backward: one decision, or a list as in keep.",
        "x+O",
        example="O",
    )
    gpu_bytes: Bytes | None = _field(
        "How much of what layers keep may lie on the GPU, per process; null: all, or what the plan chooses. The rest "
        "goes to host memory, and then to a file.",
        None,
        unit="bytes",
        example="60GiB",
        ge=0,
    )
    host_bytes: Bytes = _field(
        "How much of it may lie in pinned host memory, per process.", 0, unit="bytes", example="100GiB", ge=0
    )
    directory: str | None = _field(
        "Where what does not fit there is written, to a file without a name; null: nowhere.",
        None,
        example="/tmp",
        min_length=1,
    )
    moving_bytes: Bytes | None = _field(
        "How much of it may be on its way between GPU and elsewhere; null: what one layer keeps and another.",
        None,
        unit="bytes",
        example="4GiB",
        ge=0,
    )

    @property
    def decided(self) -> Literal["auto"] | Memory:
        """What `longspan.prepare` takes as memory.

        Raises:
            ConfigError: the settings do not go together.
        """
        if self.keep == "auto":
            return "auto"
        budget = Budget(self.gpu_bytes, self.host_bytes, self.directory, self.moving_bytes)
        return Memory(self.tile_tokens, parse_keeps(self.keep), self.compile, parse_keeps(self.rebuilt), budget)

    @field_validator("keep", "rebuilt")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if value != "auto" or info.field_name != "keep":
            parse_keeps(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        memory = self.decided
        if memory == "auto":
            self._refuse(type(self).model_fields.keys() - {"keep"}, "with keep: auto, which decides it by itself", _SET)
        elif all(keep is Keep.GRAPH for keep in memory.decisions):
            self._refuse({"gpu_bytes"}, "on layers that keep their graph, which stays on the GPU", _SET)
        elif not any(after.rebuilds and not keep.has_out for keep, after in pairwise(memory.decisions)):
            self._refuse({"rebuilt"}, "where no layer with 'O' or 'none' comes after one with 'x' or 'none'")
        return self

    def _refuse(self, names: Set[str], why: str, way_out: str = "") -> None:
        """Raise if one of these was given, as it has no effect."""
        for name, field in type(self).model_fields.items():
            if name in names and getattr(self, name) != field.default:
                raise ValueError(f"{name} has no effect {why}: leave it out{way_out}")
