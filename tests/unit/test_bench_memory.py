"""Memory settings as text, and the small settings that stand for them."""

from __future__ import annotations

import pytest

from longspan.bench.memory import format_memory, in_small, parse_memory
from longspan.errors import ConfigError
from longspan.keep import Budget, Keep, Memory

SETTINGS = {
    "-/graph/-": Memory(),
    "16384/x+O+KV/inductor": Memory(16384, Keep.X_O_KV, "inductor"),
    "64/x,none*3,O*2/-": Memory(64, (Keep.X, Keep.NONE, Keep.NONE, Keep.NONE, Keep.OUT, Keep.OUT)),
    "64/x*1/-": Memory(64, (Keep.X,)),
    "8/x,none*2/eager/gpu=64424509440,host=1073741824,rebuilt=O": Memory(
        8, (Keep.X, Keep.NONE, Keep.NONE), "eager", Keep.OUT, Budget(60 << 30, 1 << 30)
    ),
    "8/x,none*2/-/gpu=0,host=7,directory=/tmp/x,moving=9,rebuilt=x+O:O*2": Memory(
        8, (Keep.X, Keep.NONE, Keep.NONE), None, (Keep.X_O, Keep.OUT, Keep.OUT), Budget(0, 7, "/tmp/x", 9)
    ),
}


@pytest.mark.parametrize("text", SETTINGS)
def test_text_and_setting_are_the_same(text: str) -> None:
    assert parse_memory(text) == SETTINGS[text]
    assert format_memory(SETTINGS[text]) == text


def test_amounts_have_units() -> None:
    assert parse_memory("8/x/-/gpu=1.5GiB,host=2kib").budget == Budget(3 << 29, 2048)
    with pytest.raises(ConfigError, match="given as 64GiB"):
        parse_memory("8/x/-/gpu=1.5GX")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x+O", "A memory setting is TILE/KEEP/COMPILE"),
        ("big/x/-", "the tile is a number of tokens or '-', got 'big'"),
        ("0/x/-", "tile_tokens must be at least 1"),
        ("8/y/-", "layers keep one of graph, .*got 'y'"),
        ("8/x*many/-", "layers keep one of"),
        ("-/x/inductor", "compile needs tile_tokens"),
        ("8/none/-", "Layer 0 keeps nothing"),
        ("8/x/-/cpu=1GiB", "'cpu=1GiB' is no option"),
        ("8/x/-/gpu=", "'gpu=' is no option"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_memory(text)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("keep", "small", "layers"),
    [
        ("x+O", "x+O", ()),
        ("x+O*32", "x+O*2", (0, 1)),
        ("x,none*31", "x,none*2", (0, 1, 2)),
        ("x,none*6,x,none*6,x,none*2,x+O*12,graph*3", None, (0, 1, 2, 7, 8, 9, 17, 18, 29, 30)),
        ("x+O,O*7,x+O,O*7,x+O,O*7", "x+O,O*2,x+O,O*2", (0, 1, 2, 8, 9, 10)),
    ],
)
def test_small_settings_have_the_same_neighbours(keep: str, small: str | None, layers: tuple[int, ...]) -> None:
    full = parse_memory(f"16384/{keep}/inductor/gpu=60GiB,host=100GiB")
    found, chosen = in_small(full, 96, 5000)
    assert chosen == layers
    assert (found.tile_tokens, found.compile, found.budget) == (96, "inductor", Budget(5000, 1 << 30))
    if small is not None:
        assert found.keep == parse_memory(f"8/{small}/-").keep
    else:
        assert not isinstance(full.keep, Keep) and not isinstance(found.keep, Keep)
        together = set(zip(found.keep, found.keep[1:], strict=False))
        assert together == set(zip(full.keep, full.keep[1:], strict=False))


def test_what_is_rebuilt_stays_with_its_layer() -> None:
    full = parse_memory("16384/x,none*6,x,none*2/-/rebuilt=x+O*7:O*3")
    found, layers = in_small(full, 96, 0)
    assert layers == (0, 1, 2, 7, 8, 9)
    assert found.rebuilt == (Keep.X_O,) * 3 + (Keep.OUT,) * 3
    assert found.budget == Budget()
