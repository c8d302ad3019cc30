"""Packed rows divided by documents, their keys gathered: prepared models against one device, in fp64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import longspan
from dense import apart
from longspan.attention import gather as gather_module
from longspan.batch import CONTEXT
from longspan.comm.rows import exchange_rows
from longspan.engines import build_engine
from longspan.errors import ConfigError
from longspan.keep import Keep, Memory
from longspan.plan.exchange import ExchangeRule
from models import VOCABULARY, Rows, WideMode, build, one_device
from pool import RunRanks
from test_parity import Errors, compare, exact, worst
from test_stream import KEEPS, wide

pytestmark = pytest.mark.dist

ODD = Rows([[1, 7, 2, 31, 65, 1, 1, 129, 29]])
LONG = Rows([[3, 700, 1, 1, 257]], seed=1)
ACROSS = Rows([[61, 1, 1]], seed=2)  # over every rank
ALIKE = Rows([[6] * 12], seed=3)  # nobody needs a key of another rank
ONES = Rows([[1, 2] * 8 + [40]], seed=4)
PADDED = Rows([[5, 44, 9]], seed=5)
DEGREES = {"r2": (1, 2), "r3": (1, 3), "r4": (1, 4), "2x2": (2, 2)}


def gathered_errors(
    family: str,
    degrees: tuple[int, int],
    batches: list[Rows],
    memory: Any = "auto",
    told: str = "gather",
    **options: Any,
) -> Errors:
    """Train one step on each batch, and return the relative errors of the loss and of each gradient."""
    ulysses, ring = degrees
    found: Errors = {}
    for rows in batches:
        model = build(family)
        with wide():
            loss, wanted, _ = one_device(model, [rows])
            handle = longspan.prepare(
                model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, memory=memory, **options
            )
            part = handle.shard(rows.batch())
            assert part[CONTEXT].exchange.exchange == told
            assert handle.plan.kv_exchange is not None
            assert handle.plan.kv_exchange.startswith(told)
            assert handle.plan.kv_exchange in handle.plan.explain()
            out = model(**part)
            assert (handle.plan.kv_exchange or "").startswith(told)
            out.loss.backward()
            handle.reduce_gradients()
        errors = compare(model, wanted) | {"loss": apart(float(out.loss.detach()), loss)}
        found = {name: max(error, found.get(name, 0.0)) for name, error in errors.items()}
    return found


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
def test_loss_and_gradients_equal_each_document_alone(run_ranks: RunRanks, degrees: tuple[int, int]) -> None:
    world, batches = degrees[0] * degrees[1], [ODD, LONG, ACROSS, ALIKE, ONES]
    results = run_ranks(world, gathered_errors, "llama", degrees, batches, told="gather", kv_exchange="gather")
    assert exact(results), worst(results)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3-moe", "mistral-window"])
def test_families(run_ranks: RunRanks, family: str) -> None:
    results = run_ranks(2, gathered_errors, family, (1, 2), [ODD])
    assert exact(results), worst(results)


@pytest.mark.parametrize("keep", KEEPS)
def test_streamed_layers(run_ranks: RunRanks, keep: str) -> None:
    for degrees, tile in (((1, 3), 5), ((2, 2), 7)):
        world, memory = degrees[0] * degrees[1], Memory(tile, KEEPS[keep])
        results = run_ranks(world, gathered_errors, "llama", degrees, [ACROSS, ALIKE], memory, kv_exchange="gather")
        assert exact(results), worst(results)


def test_compiled_halves(run_ranks: RunRanks) -> None:
    results = run_ranks(2, gathered_errors, "llama", (1, 2), [ODD], Memory(24, Keep.X_O, "eager"))
    assert exact(results), worst(results)


def test_several_rows_and_single_documents_may_be_gathered_on_request(run_ranks: RunRanks) -> None:
    batches = [Rows([[13, 4], [29], [1, 1, 8]]), Rows([[63]]), Rows([[17], [17]])]
    for degrees in ((1, 3), (2, 2)):
        world = degrees[0] * degrees[1]
        results = run_ranks(world, gathered_errors, "llama", degrees, batches, kv_exchange="gather")
        assert exact(results), worst(results)


def test_documents_across_the_pieces_of_one_rank(run_ranks: RunRanks) -> None:
    """Nobody needs another rank's keys; the middle document lies in both pieces of the last rank, which touch."""
    results = run_ranks(2, gathered_errors, "llama", (1, 2), [Rows([[4, 8, 4], [4, 8, 4]])], kv_exchange="gather")
    assert exact(results), worst(results)


def test_they_go_around_a_ring_by_themselves(run_ranks: RunRanks) -> None:
    batches = [Rows([[13, 4], [29], [1, 1, 8]]), Rows([[63]])]
    assert exact(run_ranks(2, gathered_errors, "llama", (1, 2), batches, told="ring"))
    assert exact(run_ranks(2, gathered_errors, "llama", (1, 2), [ODD], told="ring", kv_exchange="ring"))


def engine_errors(engine_name: str) -> Errors:
    """Train under an engine, each of two data ranks on a row of its own."""
    rows = [ODD, ACROSS]
    model = build("llama")
    with WideMode():
        loss, wanted, targets = one_device(model, rows)
        engine = build_engine(engine_name, dist.get_world_size())
        handle = longspan.prepare(model, 2, ring_degree=2, grad_reduction=engine.grad_reduction)
        module = engine.wrap(model, handle)
        part = handle.shard(rows[handle.mesh.data.rank].batch(), num_items=targets)
        assert part[CONTEXT].exchange.exchange == "gather"
        with engine.accumulating(last=True):
            out = module(**part)
            out.loss.backward()
        engine.reduce()
    return compare(model, wanted) | {"loss": apart(float(out.loss.detach()), loss)}


def test_an_engine_sees_nothing_of_it(run_ranks: RunRanks) -> None:
    results = run_ranks(4, engine_errors, "ddp")
    assert exact(results), worst(results)


def logits_of(ulysses: int, ring: int, changed: bool) -> list[torch.Tensor]:
    """Return full logits, by evaluation, of a batch of which the second document may have another token."""
    model = build("llama").eval()
    handle = longspan.prepare(model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, logits=True)
    batch = ODD.batch()
    if changed:
        batch["input_ids"][0, 3] = (batch["input_ids"][0, 3] + 1) % VOCABULARY
    part = handle.shard(batch)
    assert part[CONTEXT].exchange.exchange == "gather"
    with torch.no_grad():
        return [handle.gather(model(**part).logits, part)[0]]


@pytest.mark.parametrize("degrees", [(1, 2), (1, 3), (2, 2)], ids=str)
def test_a_token_moves_its_own_document_only(run_ranks: RunRanks, degrees: tuple[int, int]) -> None:
    world = degrees[0] * degrees[1]
    (before,), (after,) = (run_ranks(world, logits_of, *degrees, changed)[0] for changed in (False, True))
    moved = (before != after).any(-1)
    assert not moved[:3].any()
    assert not moved[8:].any(), "bit for bit"
    assert moved[3:8].all(), "the control: all from the token on, which is its document's third"


def exchanges(rows: Rows) -> tuple[int, list[int]]:
    """Count the exchanges of one forward and backward on this rank, and the rows of each."""
    model = build("llama")
    handle = longspan.prepare(model, 2, ring_degree=2)
    with patch.object(gather_module, "exchange_rows", side_effect=exchange_rows) as made:
        model(**handle.shard(rows.batch())).loss.backward()
    return made.call_count, [len(call.args[0]) for call in made.call_args_list]


def test_nothing_travels_where_nobody_needs_anything(run_ranks: RunRanks) -> None:
    assert run_ranks(2, exchanges, ALIKE) == [(0, [])] * 2


def test_only_needed_keys_travel(run_ranks: RunRanks) -> None:
    (calls, mine), (_, theirs) = run_ranks(2, exchanges, Rows([[9] * 31 + [5]]))
    assert calls == 2 * 3, "two layers: keys in forward, keys and their gradients in backward"
    assert 0 < sum(mine) + sum(theirs) < 6 * 9, "a part of one document"


def test_decisions_and_their_reasons() -> None:
    assert ExchangeRule("ring").before(1, True) == ("ring", "kv_exchange='ring'")
    assert "2 rows share" in str(ExchangeRule().before(2, True))
    assert "one document" in str(ExchangeRule().before(1, False))
    assert ExchangeRule(refusal="no packs").before(1, True) == ("ring", "no packs")
    assert ExchangeRule().before(1, True) is None


def refused(kernel: str, choice: Any) -> str:
    try:
        longspan.prepare(build("llama"), 2, ring_degree=2, kernel=kernel, kv_exchange=choice)
    except ConfigError as error:
        return str(error)
    return ""


def test_an_exchange_that_cannot_be_had_is_refused(run_ranks: RunRanks) -> None:
    assert (
        run_ranks(2, refused, "auto", "scatter")
        == ["kv_exchange must be one of auto, ring, gather, got 'scatter'."] * 2
    )
    with pytest.raises(ConfigError, match=r"kv_exchange 'gather' needs packed causal calls .*: dense only\. Name"):
        ExchangeRule("gather", refusal="dense only")
    with nullcontext():
        assert ExchangeRule("auto", refusal="dense only").asked == "auto"
