"""What layers keep, in bytes, and the tier it goes to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.keep import Budget, Keep
from longspan.plan.kept import LayerSize, Tier, assign, kept_bytes


@dataclass(frozen=True)
class Heads:
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    recurrent: bool = False


SIZE = LayerSize(tokens=1024, hidden=4096, operands=Heads(), itemsize=2, x_itemsize=2)


def test_bytes_of_an_8b_model() -> None:
    kib = {keep: kept_bytes(keep, SIZE) / 1024 / SIZE.tokens for keep in Keep}
    assert kib == {
        Keep.GRAPH: 0,
        Keep.PRODUCTS: 8 + 8.125 + 4 + 8,
        Keep.X_O_KV: 8 + 8.125 + 4,
        Keep.X_O: 8 + 8.125,
        Keep.X: 8,
        Keep.OUT: 8.125,
        Keep.NONE: 0,
    }


def test_exchanged_heads() -> None:
    whole = kept_bytes(Keep.X_O_KV, SIZE)
    assert kept_bytes(Keep.X_O_KV, replace(SIZE, ulysses=8)) == whole
    assert kept_bytes(Keep.X_O_KV, replace(SIZE, ulysses=32)) == whole + 3 * 1024 * 4 * 1024, "each KV head four times"
    uneven = [kept_bytes(Keep.OUT, replace(SIZE, operands=Heads(6, 3), ulysses=4, rank=r)) for r in range(4)]
    lse = 4 * 1024 * 4
    assert [n - uneven[-1] for n in uneven] == [lse, lse, 0, 0]
    assert kept_bytes(Keep.OUT, replace(SIZE, operands=Heads(6, 3), ulysses=4)) == uneven[0], "the most of any rank"
    assert kept_bytes(Keep.X_O_KV, replace(SIZE, whole=True)) == whole + 8 * 1024 * 1024, "q too"


def test_recurrent_layers() -> None:
    size = replace(SIZE, operands=Heads(32, 16, recurrent=True))
    kib = {keep: kept_bytes(keep, size) / 1024 / size.tokens for keep in (Keep.X_O_KV, Keep.X_O, Keep.X, Keep.OUT)}
    operands = 16 * (2 * 128 + 2 * 128 + 2 * 2) * 2 / 1024
    assert kib == {Keep.X_O_KV: 16 + operands, Keep.X_O: 16, Keep.X: 8, Keep.OUT: 8}, "no lse"
    uneven = kept_bytes(Keep.X_O_KV, replace(size, ranks=12)) - kept_bytes(Keep.X_O, size)
    assert uneven == operands * 1024 * 1024 * 12 * 2 / 16, "12 times the tokens with 2 heads of 16"
    assert kept_bytes(Keep.X_O_KV, replace(size, ranks=64, ulysses=64)) == kept_bytes(Keep.X_O_KV, size), "4 stretches"


SIZES = st.lists(st.integers(0, 50), max_size=12)
BUDGETS = st.builds(Budget, st.integers(0, 200), st.integers(0, 200), st.sampled_from([None, "/tmp"]))


@given(SIZES, BUDGETS)
def test_tiers_hold_what_they_are_given(sizes: list[int], budget: Budget) -> None:
    try:
        tiers = assign(sizes, budget)
    except ConfigError as error:
        assert budget.directory is None
        assert sum(sizes) > (budget.gpu_bytes or 0) + budget.host_bytes, "it was full to the last byte"
        assert "Raise host_bytes, name a directory" in str(error)
        return
    held = {tier: sum(s for s, t in zip(sizes, tiers, strict=True) if t is tier) for tier in Tier}
    assert len(tiers) == len(sizes)
    assert budget.directory is not None or sum(sizes) <= (budget.gpu_bytes or 0) + budget.host_bytes
    most = max(sizes, default=0) if budget.directory is None else 1  # one layer a tier may reach into the next
    assert held[Tier.GPU] < (budget.gpu_bytes or 0) + most or not held[Tier.GPU]
    assert held[Tier.HOST] < budget.host_bytes + most or not held[Tier.HOST]
    for index, (size, tier) in enumerate(zip(sizes, tiers, strict=True)):
        later = [(s, t) for s, t in zip(sizes[index + 1 :], tiers[index + 1 :], strict=True)]
        if tier is not Tier.GPU:
            assert sum(s for s, t in later if t is Tier.GPU) + size > (budget.gpu_bytes or 0), "only what does not fit"
        if tier is Tier.FILE:
            assert sum(s for s, t in later if t is Tier.HOST) + size > budget.host_bytes


@given(st.integers(1, 50), st.integers(0, 12), BUDGETS)
def test_layers_alike_leave_in_order(size: int, count: int, budget: Budget) -> None:
    try:
        tiers = assign([size] * count, budget)
    except ConfigError:
        return
    order = [list(Tier).index(tier) for tier in tiers]
    assert order == sorted(order, reverse=True), "the first go to the slowest"


def test_without_a_budget_nothing_leaves() -> None:
    assert assign([1 << 50] * 3, Budget()) == [Tier.GPU] * 3


def test_too_much_is_told_with_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"keep 3\.000 GiB .* gpu_bytes has 1\.000 GiB left and host_bytes 0 bytes: 2"
    ):
        assign([1 << 30] * 3, Budget(1 << 30))
    with pytest.raises(ConfigError, match="are missing|1 bytes"):
        assign([2, 2], Budget(2, 1))


def test_a_layer_that_fits_no_tier_whole_is_divided() -> None:
    assert assign([2, 2], Budget(3, 1)) == [Tier.HOST, Tier.GPU]
    with pytest.raises(ConfigError):
        assign([2, 2, 1], Budget(3, 1))
