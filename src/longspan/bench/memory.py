"""Memory settings as one line of text, and small ones that stand for large ones.

`TILE/KEEP/COMPILE[/NAME=VALUE,...]`: `16384/x,none*6,x,none*6/inductor/gpu=60GiB,host=100GiB,rebuilt=O`. TILE is the
tokens of a rank per tile, `-` for one tile. KEEP is one decision for all layers or a list, in which `x*3` stands for
three. COMPILE is a backend of torch.compile, `-` for none. Then, optionally, the budgets of the tiers `gpu`, `host` and
`directory` and of what is `moving` between them, and what layers keep that are `rebuilt` (a list is separated by `:`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from longspan.config.section import parse_bytes
from longspan.errors import ConfigError
from longspan.keep import Budget, Keep, Memory, parse_keeps

_FEW = 2


def parse_memory(text: str) -> Memory:
    """Read a memory setting.

    Raises:
        ConfigError: it cannot be read, or its parts do not go together.
    """
    parts = text.split("/", 3)
    if len(parts) < 3:
        raise ConfigError(f"A memory setting is TILE/KEEP/COMPILE[/NAME=VALUE,...] or auto, got {text!r}.")
    tile, keep, backend, *more = parts
    if tile != "-" and not tile.isdecimal():
        raise ConfigError(f"Memory setting {text!r}: the tile is a number of tokens or '-', got {tile!r}.")
    try:
        memory = Memory(None if tile == "-" else int(tile), parse_keeps(keep), None if backend == "-" else backend)
        return _with_options(memory, more[0]) if more else memory
    except ConfigError as error:
        raise ConfigError(f"Memory setting {text!r}: {error}") from None


def format_memory(memory: Memory) -> str:
    """Write a memory setting so that `parse_memory` reads it."""
    tile = "-" if memory.tile_tokens is None else str(memory.tile_tokens)
    options = []
    if memory.budget.gpu_bytes is not None:
        options.append(f"gpu={memory.budget.gpu_bytes}")
    if memory.budget.host_bytes:
        options.append(f"host={memory.budget.host_bytes}")
    if memory.budget.directory is not None:
        options.append(f"directory={memory.budget.directory}")
    if memory.budget.moving_bytes is not None:
        options.append(f"moving={memory.budget.moving_bytes}")
    if memory.rebuilt != Memory().rebuilt:
        options.append(f"rebuilt={_told(memory.rebuilt, ':')}")
    return "/".join([tile, _told(memory.keep, ","), memory.compile or "-", *([",".join(options)] if options else [])])


def in_small(memory: Memory, tile_tokens: int, hidden_bytes: int) -> tuple[Memory, tuple[int, ...]]:
    """Return a setting of few layers with the same kinds of layers next to each other, in the same tiers.

    Args:
        tile_tokens: of the small setting, where it has tiles.
        hidden_bytes: of a layer's hidden states; a budget for the GPU becomes as much, so that the rest must leave it.

    Returns:
        The setting, and the layers it is made of; none if one decision holds for all.
    """
    budget = memory.budget
    if budget.gpu_bytes is not None:
        budget = replace(budget, gpu_bytes=hidden_bytes, host_bytes=min(budget.host_bytes, 1 << 30))
    tile = None if memory.tile_tokens is None else tile_tokens
    if isinstance(memory.keep, Keep):
        rebuilt = memory.rebuilt if isinstance(memory.rebuilt, Keep) else memory.rebuilt[0]
        return replace(memory, tile_tokens=tile, budget=budget, rebuilt=rebuilt), ()
    pairs = list(zip(memory.keep, _per_layer(memory.rebuilt, len(memory.keep)), strict=True))
    chosen = _representative(pairs)
    rebuilt = memory.rebuilt if isinstance(memory.rebuilt, Keep) else tuple(pairs[i][1] for i in chosen)
    keep = tuple(pairs[i][0] for i in chosen)
    return replace(memory, tile_tokens=tile, budget=budget, keep=keep, rebuilt=rebuilt), chosen


def _representative(pairs: Sequence[tuple[Keep, Keep]]) -> tuple[int, ...]:
    """Choose layers: of each stretch that begins with kept hidden states, or a graph, and follows from them, a few; of
    equal stretches in a row, two."""
    shortened = []
    for stretch in _stretches(pairs):
        first, *rest = stretch
        few = [i for _, run in groupby(rest, key=lambda i: pairs[i]) for i in list(run)[:_FEW]]
        shortened.append((first, *few))
    chosen: list[int] = []
    for _, alike in groupby(shortened, key=lambda stretch: [pairs[i] for i in stretch]):
        for stretch in list(alike)[:_FEW]:
            chosen += stretch
    return tuple(chosen)


def _stretches(pairs: Sequence[tuple[Keep, Keep]]) -> Iterator[list[int]]:
    stretch: list[int] = []
    for i, (keep, _) in enumerate(pairs):
        if stretch and keep not in (Keep.NONE, Keep.OUT):
            yield stretch
            stretch = []
        stretch.append(i)
    yield stretch


def _with_options(memory: Memory, text: str) -> Memory:
    given: dict[str, str] = {}
    for option in text.split(","):
        name, _, value = option.partition("=")
        if name not in ("gpu", "host", "directory", "moving", "rebuilt") or not value:
            raise ConfigError(f"{option!r} is no option; use gpu=, host=, directory=, moving=, rebuilt=.")
        given[name] = value
    sizes = {name: parse_bytes(given[name]) for name in ("gpu", "host", "moving") if name in given}
    budget = Budget(sizes.get("gpu"), sizes.get("host", 0), given.get("directory"), sizes.get("moving"))
    rebuilt = parse_keeps(given["rebuilt"], ":") if "rebuilt" in given else memory.rebuilt
    return replace(memory, budget=budget, rebuilt=rebuilt)


def _told(decisions: Keep | tuple[Keep, ...], separator: str) -> str:
    if isinstance(decisions, Keep):
        return decisions
    runs = [(keep, len(list(run))) for keep, run in groupby(decisions)]
    if len(runs) == 1:  # without a count it would be one decision for all layers
        return f"{runs[0][0]}*{runs[0][1]}"
    return separator.join(keep if count == 1 else f"{keep}*{count}" for keep, count in runs)


def _per_layer(decisions: Keep | tuple[Keep, ...], count: int) -> tuple[Keep, ...]:
    return (decisions,) * count if isinstance(decisions, Keep) else decisions
