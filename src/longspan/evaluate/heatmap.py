"""Scores by length and depth as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError


def check_plotting() -> None:
    """Refuse to draw where matplotlib is not installed.

    Raises:
        ConfigError: with the way out.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "The heat map needs matplotlib, which is not installed: pip install 'longspan[eval]', or leave it out "
            "(--no-plot)."
        )


def draw_heatmap(title: str, cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a PNG: lengths from left to right, depths from top to bottom, scores from red to green.

    Args:
        cells: what `evaluate` returned.
    """
    from matplotlib.figure import Figure  # an extra, and slow to load

    lengths, depths, scores = grid(cells)
    figure = Figure(figsize=(2.5 + 0.9 * len(lengths), 2 + 0.45 * len(depths)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(scores, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for row, line in enumerate(scores):
        for column, score in enumerate(line):
            color = "black" if 0.15 < score < 0.85 else "white"  # on the dark ends of the scale
            axes.text(column, row, f"{score:.0%}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(lengths)), [format_size(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("depth of the needle")
    axes.set_title(title, parse_math=False)
    figure.colorbar(image, label="needles found")
    figure.savefig(path, dpi=150)


def grid(cells: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float], list[list[float]]]:
    """Return lengths, depths, and scores by depth and length."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    scores = {(cell["depth"], cell["length"]): cell["score"] for cell in cells}
    return lengths, depths, [[scores[depth, length] for length in lengths] for depth in depths]


def format_size(tokens: int) -> str:
    """Write a number of tokens as its flag does: 128K, 1M, or all digits."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"
