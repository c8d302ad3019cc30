"""What was told of steps before anyone had run them, beside what was measured on a later day."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from longspan.bench.settings import AUTO

Content = Mapping[str, Any]


def outcomes(forecast: Content, files: Iterable[Content]) -> list[list[str]]:
    """Return a line of text per configuration, titles first.

    Args:
        forecast: content of `predictions.json`.
        files: contents of result files, the newest last; those of the day of the forecast or earlier do not count, nor
            those of degrees or engines that nothing was told of.
    """
    found: dict[tuple[Any, ...], Content] = {}
    for content in files:
        if content.get("what") != "step" or content["gpu"] != forecast["gpu"] or content["date"] <= forecast["date"]:
            continue
        work = content["asked"]["work"]
        if work.get("ulysses") or work.get("ring") or work.get("engine", "").startswith("zero"):
            continue
        rank = (work.get("adapter") or {}).get("rank")
        for row in content["rows"] if work["layers"] is None else ():
            if row.get("memory") == AUTO and row["state"] == "done":
                found[work["model"], content["gpus"], row["tokens"], rank] = row
    titles = ["model", "GPUs", "tokens", "adapters", "held out", "predicted s", "s/step", "off by"]
    lines = [[*titles, "predicted GiB", "peak GiB", "off by"]]
    for told in forecast["rows"]:
        row = found.get((told["model"], told["gpus"], told["tokens"], told["lora_rank"]), {})
        lines.append(
            [
                told["model"],
                str(told["gpus"]),
                f"{told['tokens']:,}",
                "" if told["lora_rank"] is None else f"rank {told['lora_rank']}",
                "yes" if told["held_out"] else "",
                *_beside(told["predicted_s"], row.get("step_s")),
                *_beside(told["predicted_gib"], row.get("peak_gib")),
            ]
        )
    return lines


def _beside(told: float, measured: float | None) -> tuple[str, str, str]:
    if measured is None:
        return f"{told:.4g}", "not measured", ""
    return f"{told:.4g}", f"{measured:.4g}", f"{100 * (told / measured - 1):+.1f} %"
