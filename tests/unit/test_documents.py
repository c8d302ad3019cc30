"""Documents of a batch: every source is understood, and two that disagree are an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.documents import Documents
from longspan.errors import BatchError
from longspan.layout import Layout

STARTS = ((0, 3, 4), (0,))
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
NUMBERS = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3], [1] * 8])
BORDERS = [0, 3, 4, 8, 16]


def find(rows: int = 2, tokens: int = 8, **batch: Any) -> Documents:
    return Documents.find(batch, rows, tokens)


@pytest.mark.parametrize(
    "batch",
    [
        {"position_ids": POSITIONS},
        {"position_ids": POSITIONS.int()},
        {"attention_mask": NUMBERS},
        {"seq_idx": NUMBERS - 1},
        {"cu_seqlens": torch.tensor(BORDERS)},
        {"cu_seqlens": BORDERS},
        {"cu_seqlens": torch.tensor([BORDERS], dtype=torch.int32)},
        {"cu_seq_lens_q": torch.tensor(BORDERS), "cu_seq_lens_k": torch.tensor(BORDERS), "max_length_q": 8},
        {"cu_seqlens": BORDERS, "position_ids": POSITIONS, "attention_mask": NUMBERS, "seq_idx": NUMBERS},
        {"cu_seqlens": BORDERS, "attention_mask": torch.ones(2, 8)},
    ],
    ids="+".join,
)
def test_every_source_gives_the_same_documents(batch: dict[str, Any]) -> None:
    found = find(**batch)
    assert found.starts == STARTS
    assert found.positions is not None
    assert torch.equal(found.positions, POSITIONS)
    assert found.lengths is None
    assert found.max_position == 7


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"attention_mask": torch.ones(2, 8)},
        {"attention_mask": torch.ones(2, 8, dtype=torch.bool)},
        {"position_ids": torch.arange(8)},
        {"position_ids": torch.arange(8)[None]},
        {"position_ids": torch.arange(8).expand(2, 8)},
        {"cu_seqlens": [0, 8, 16]},
    ],
    ids=lambda batch: "+".join(batch) or "nothing",
)
def test_a_row_can_be_one_document(batch: dict[str, Any]) -> None:
    found = find(**batch)
    assert found.starts is None
    assert found.max_position == 7
    assert torch.equal(found.cut_positions(Layout(8), 0), torch.arange(8).expand(2, 8))


def test_positions_need_not_start_at_zero() -> None:
    found = find(1, 5, position_ids=torch.tensor([[7, 8, 9, 3, 4]]))
    assert found.starts == ((0, 3),)
    assert found.max_position == 9


def test_positions_that_jump_ahead_need_a_second_word() -> None:
    """They may be a document that starts late, or one document with gaps, as in training on skipped positions."""
    positions = torch.tensor([[0, 1, 2, 10, 11]])
    with pytest.raises(BatchError, match="Row 0: position_ids jump from 2 to 10 at token 3"):
        find(1, 5, position_ids=positions)
    assert find(1, 5, position_ids=positions, cu_seqlens=[0, 3, 5]).starts == ((0, 3),)
    with pytest.raises(BatchError, match=r"cu_seqlens puts documents at \[0\], position_ids at \[0, 3\]"):
        find(1, 5, position_ids=positions, cu_seqlens=[0, 5])


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"position_ids": torch.arange(8).expand(2, 8)},
            r"Row 0: cu_seqlens puts documents at \[0, 3, 4\], position_ids",
        ),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3], [1] * 8])}, r"attention_mask at \[0, 3, 5\]"),
        ({"seq_idx": torch.tensor([[0] * 8, [0] * 7 + [1]])}, r"Row 0: .* seq_idx at \[0\]"),
        ({"cu_seq_lens_q": [0, 4, 8, 16]}, "cu_seqlens and cu_seq_lens_q describe different documents"),
    ],
)
def test_sources_that_disagree_are_refused(other: dict[str, Any], told: str) -> None:
    with pytest.raises(BatchError, match=told):
        find(cu_seqlens=BORDERS, **other)


def test_right_padding_becomes_lengths() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8])
    found = find(attention_mask=mask)
    assert found.lengths == (5, 8)
    assert found.starts is None


def test_negative_positions_mark_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7]])
    found = find(position_ids=positions)
    assert found.lengths == (5, 8)
    assert found.starts == ((0, 3), (0,))
    assert found.positions is not None
    assert int(found.positions.min()) == 0
    both = find(position_ids=positions, attention_mask=torch.tensor([[1] * 5 + [0] * 3, [1] * 8]))
    assert (both.starts, both.lengths) == (found.starts, found.lengths)


@pytest.mark.parametrize("pad", [0, 1, 2, 99, -1])
def test_positions_of_padding_do_not_matter(pad: int) -> None:
    """Tokenizers and collators fill them with anything."""
    positions = torch.tensor([[0, 1, 2, 0, 1, pad, pad, pad]])
    found = find(1, position_ids=positions, attention_mask=torch.tensor([[1] * 5 + [0] * 3]))
    assert (found.starts, found.lengths) == (((0, 3),), (5,))


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx", "attention_mask"])
def test_padding_may_be_a_document_of_its_own(name: str) -> None:
    """Packers mark what fills up a row as one more document, or several."""
    sources: dict[str, Any] = {
        "cu_seqlens": [0, 3, 5, 7, 8],
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 0, 0, -1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]]),
    }
    batch = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 0]]),
        "attention_mask": torch.tensor([[1] * 5 + [0] * 3]),
        name: sources[name],
    }
    found = find(1, **batch)
    assert (found.starts, found.lengths) == (((0, 3),), (5,))


def test_the_largest_position_is_that_of_the_batch_as_it_was_given() -> None:
    """Tables that grow with the length must be those of one device, and the same on every rank."""
    positions = torch.tensor([[0, 1, 2, 3, 1, 1, 1, 1]])
    found = find(1, position_ids=positions, attention_mask=torch.tensor([[1] * 4 + [0] * 4]))
    assert found.max_position == 3
    layout = Layout(8, ring=2)
    for rank in range(2):
        assert int(found.cut_positions(layout, rank).max()) <= 3
    assert find(1, attention_mask=torch.tensor([[1] * 4 + [0] * 4])).max_position == 7  # the model would count on


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1], [1] * 4])}, "Row 0 of attention_mask has padding before"),
        (
            {"attention_mask": torch.tensor([[1] * 4, [1, 0, 1, 1]])},
            "Row 1 of attention_mask has padding before or betw",
        ),
        ({"attention_mask": torch.tensor([[1] * 4, [0] * 4])}, "Row 1 of attention_mask holds no token"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"got \[2, 1, 4, 4\]. A mask per pair of tokens cannot"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask must be \[2, 4\]"),
        ({"attention_mask": [[1, 1, 1, 1]]}, "got list"),
        ({"attention_mask": torch.tensor([[1, 1, -1, -1], [1] * 4])}, "attention_mask"),
        ({"attention_mask": torch.tensor([[1, 0.5, 0.5, 0], [1] * 4])}, "attention_mask"),
        ({"attention_mask": torch.tensor([[1, 2, 1, 1], [1] * 4])}, "attention_mask gives tokens that are apart"),
        ({"seq_idx": torch.tensor([[0, 1, 0, 0], [0] * 4])}, "seq_idx gives tokens that are apart"),
        ({"seq_idx": torch.zeros(4)}, r"seq_idx must be \[2, 4\], got \[4\]"),
        ({"seq_idx": 3}, "got int"),
        ({"position_ids": torch.zeros(2, 2, 4, dtype=torch.long)}, r"got torch.int64 \[2, 2, 4\]"),
        ({"position_ids": torch.zeros(2, 4)}, "position_ids"),
        ({"position_ids": [0, 1, 2, 3]}, "got list"),
        ({"position_ids": torch.tensor([[0, -1, 1, 2]])}, "may only mark padding on the right"),
        ({"position_ids": torch.tensor([[-1, -1, -1, -1]])}, "behind at least one token"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, -1]]), "attention_mask": torch.tensor([[1, 1, 0, 0]] * 2)},
            "mark different tokens as padding",
        ),
        ({"cu_seqlens": [0, 4]}, r"rise from 0 to the batch's 8 tokens .* \(ends at 4\)"),
        ({"cu_seqlens": [1, 8]}, "rise from 0"),
        ({"cu_seqlens": [0, 4, 4, 8]}, "without empty documents"),
        ({"cu_seqlens": [0, 5, 3, 8]}, "rise from 0"),
        ({"cu_seqlens": []}, "ends at None"),
        ({"cu_seqlens": [0, 3, 8]}, "cross from row 0 into row 1"),
        ({"cu_seqlens": [0.0, 4.0, 8.0]}, "cu_seqlens"),
        ({"cu_seqlens": [[0, 4], [0, 2, 4]]}, "cu_seqlens"),
        ({"cu_seqlens": "0,4,8"}, "cu_seqlens"),
    ],
)
def test_what_cannot_be_understood_is_refused(batch: dict[str, Any], told: str) -> None:
    with pytest.raises(BatchError, match=told):
        find(2, 4, **batch)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.data())
def test_all_sources_agree_for_any_documents(rows: int, tokens: int, data: st.DataObject) -> None:
    inner = st.sets(st.integers(1, tokens - 1)) if tokens > 1 else st.just(set())
    starts = tuple((0, *sorted(data.draw(inner))) for _ in range(rows))
    numbers = torch.zeros(rows, tokens, dtype=torch.long)
    positions = torch.zeros(rows, tokens, dtype=torch.long)
    for row, found in enumerate(starts):
        for number, (a, b) in enumerate(zip(found, [*found[1:], tokens], strict=True)):
            numbers[row, a:b] = number + 1
            positions[row, a:b] = torch.arange(b - a)
    sources = {
        "position_ids": positions,
        "seq_idx": numbers,
        "attention_mask": numbers,
        "cu_seqlens": [row * tokens + s for row in range(rows) for s in starts[row]] + [rows * tokens],
    }
    wanted = starts if any(len(s) > 1 for s in starts) else None
    for name in ("position_ids", "seq_idx", "attention_mask", "cu_seqlens"):
        alone = find(rows, tokens, **{name: sources[name]})
        assert alone.starts == wanted
        assert alone.positions is None or torch.equal(alone.positions, positions)
    assert find(rows, tokens, **sources).starts == wanted
