"""The tokens that a rank runs its recurrences over, and where documents begin among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan.layout import Piece
from longspan.mask import Mask


@dataclass(frozen=True)
class Stretch:
    """A contiguous range of the tokens of every row, with what precedes it for a convolution.

    Args:
        piece: the range; `halo` tokens before it come with it, fewer where the row begins.
        numbers: [B, halo + tokens] document of each token.
        borders: cumulative lengths of the runs of one document each, over the rows' tokens laid one after the other,
            without the halo.
        first, last: for each row its first and its last run.
        continued: for each row whether its first token's document began before it.
    """

    piece: Piece
    halo: int
    numbers: Tensor
    borders: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    continued: tuple[bool, ...]

    @classmethod
    def of(cls, mask: Mask, rows: int, piece: Piece, halo: int, device: torch.device) -> Stretch:
        """Find the documents of a range. Cost: O(documents + tokens) on the host, one copy to the device."""
        halo = min(halo, piece.start)
        tokens = torch.arange(piece.start - halo, piece.stop)
        numbers, borders, first, last, continued = [], [0], [], [], []
        for row in range(rows):
            starts = (0,) if mask.documents is None else mask.documents[row]
            numbers.append(torch.bucketize(tokens, torch.tensor(starts), right=True))
            inside = [start for start in starts if piece.start < start < piece.stop]
            first.append(len(borders) - 1)
            base = row * len(piece) - piece.start
            borders += [base + stop for stop in (*inside, piece.stop)]
            last.append(len(borders) - 2)
            continued.append(piece.start not in starts)
        joined = torch.stack(numbers).to(torch.int32).to(device)
        return cls(piece, halo, joined, tuple(borders), tuple(first), tuple(last), tuple(continued))

    @cached_property
    def own(self) -> Tensor:
        """Document of each token without the halo, [B, tokens]."""
        return self.numbers[:, self.halo :]

    @cached_property
    def entering(self) -> Tensor:
        """Document that a state from before the range belongs to, [B]: that of the first token, or none."""
        goes_on = torch.tensor(self.continued, device=self.numbers.device)
        return torch.where(goes_on, self.own[:, 0], -1)

    @cached_property
    def first_runs(self) -> Tensor:
        """`first` on the device."""
        return torch.tensor(self.first, device=self.numbers.device)

    @cached_property
    def passes(self) -> Tensor:
        """For each row whether the document that enters it is also the one it ends in."""
        through = [a == b and goes_on for a, b, goes_on in zip(self.first, self.last, self.continued, strict=True)]
        return torch.tensor(through, device=self.numbers.device)

    @cached_property
    def last_cu_seqlens(self) -> Tensor:
        """Borders of the last runs of all rows, laid one after the other, on the device."""
        lengths = torch.tensor([0, *(self.borders[run + 1] - self.borders[run] for run in self.last)])
        return lengths.cumsum(0).to(self.numbers.device)

    def last_tokens(self, t: Tensor) -> Tensor:
        """Return the last run of every row of t [B, T, ...], laid one after the other, [1, tokens, ...]."""
        stop = t.shape[1]
        runs = [t[row, stop - (self.borders[run + 1] - self.borders[run]) :] for row, run in enumerate(self.last)]
        return (runs[0] if len(runs) == 1 else torch.cat(runs))[None]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """`borders` on the device, as varlen kernels take them."""
        return torch.tensor(self.borders, dtype=torch.long, device=self.numbers.device)
