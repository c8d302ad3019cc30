"""Needle in a haystack: does a model find one sentence in a long text, by the length and where it stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.batch import IGNORE_INDEX
from longspan.errors import ConfigError, TrainingError
from longspan.evaluate.prompts import Prompts, Row
from longspan.evaluate.settings import NeedleSettings
from longspan.integrations.positions import window_tokens
from longspan.integrations.transformers import Applied
from longspan.once import tell


def evaluate(handle: Applied, prompts: Prompts, module: nn.Module | None = None) -> list[dict[str, Any]]:
    """Score a prepared model on every row; call it on every process.

    Each row, its answer included, goes through the model once, divided over the ranks of a sequence. That tells what
    greedy decoding would have answered, without decoding: it picks the most likely token after the prompt; if that is
    the answer's first token, it goes on with the very prefix that the row holds, and so on. So decoding gives the
    answer, token by token, exactly if the most likely token at each of its positions is the next one of the answer;
    after a first difference the row no longer shows what decoding would see, but the answer is missed already.
    Replicas of the model, if there are more processes than share a sequence, take rows in turn.

    Args:
        handle: of the model, which is evaluated as it is, in evaluation mode.
        prompts: where the rows come from, for this model's tokenizer.
        module: what an engine made of the model, if there is one.

    Returns:
        A cell per length and depth: `length`, `depth`, `trials`, `matches`, `score` (matches by trials), `mean_logp`
        (mean log-probability of an answer's tokens, over the trials), `answer_tokens` and `seconds` (means), and
        `rows`. The same on every process.

    Raises:
        ConfigError: rows that the model has no positions for, that have no room, or tokens that it does not know.
        TrainingError: a log-probability that is not finite.

    Cost: one forward pass per row, in which nothing is kept and only the answer's tokens get logits.
    """
    settings, config = prompts.settings, handle.model.config
    check_lengths(config, settings)
    rows = prompts.rows()
    scores = _scores(handle, prompts, rows, module)
    size = settings.trials
    return [_cell(rows[at : at + size], scores[at : at + size].tolist()) for at in range(0, len(rows), size)]


def check_lengths(config: Any, settings: NeedleSettings) -> None:
    """Refuse rows that a model has no positions for.

    Raises:
        ConfigError: with the way out.
    """
    known, longest = window_tokens(config), max(settings.lengths)
    if known is not None and longest > known and not settings.allow_longer:
        raise ConfigError(
            f"Rows of {longest:,} tokens are longer than the {known:,} positions that the model knows "
            "(max_position_embeddings). Shorten lengths, stretch its rotary embeddings (model.rope of a run), or allow "
            "longer rows to see how it does beyond them (--allow-longer)."
        )


def _scores(handle: Applied, prompts: Prompts, rows: Sequence[Row], module: nn.Module | None) -> Tensor:
    """Score all rows -> [rows, 3]: found (0 or 1), mean log-probability, seconds; the same on every process."""
    data, training = handle.mesh.data, handle.model.training
    scores = torch.zeros(len(rows), 3, dtype=torch.float64)
    handle.model.eval()
    try:
        for first in range(0, len(rows), data.size):
            at = min(first + data.rank, len(rows) - 1)  # engines want as many forward passes of every replica
            score = _score(handle, prompts, rows[at], module)
            if at == first + data.rank:
                scores[at] = torch.tensor(score, dtype=torch.float64)
            if at + 1 == len(rows) or rows[at + 1].length > rows[at].length:
                tell(f"longspan: rows of {rows[at].length:,} tokens are done, {score[-1]:.2f} s for the last")
    finally:
        handle.model.train(training)
    if data.size > 1:
        there = scores.to(handle.mesh.device_type)
        dist.all_reduce(there, group=data.group)
        scores = there.cpu()
    return scores


def _score(handle: Applied, prompts: Prompts, row: Row, module: nn.Module | None) -> tuple[float, float, float]:
    """Run one row; return whether its answer is found, the mean log-probability of its tokens, and the seconds."""
    started = time.perf_counter()
    ids, count = prompts.ids(row), len(row.answer)
    largest, vocabulary = int(ids.max()), handle.model.config.get_text_config().vocab_size
    if largest >= vocabulary:
        raise ConfigError(
            f"The tokenizer makes token id {largest:,}, but the model's vocabulary ends at {vocabulary - 1:,}: take "
            "the model's own tokenizer."
        )
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[-count:] = ids[-count:]
    part = handle.shard({"input_ids": ids[None], "labels": labels[None]})
    found = torch.stack(handle.greedy_scores(part, gather=True, model=module))  # [2, 1, length]
    logps, hits = found[:, 0, -count - 1 : -1].double().cpu()  # a token's target is the next one
    if not logps.isfinite().all():
        raise TrainingError(
            f"The model's log-probabilities are not finite on a row of {row.length:,} tokens, needle at {row.asked:g}%."
        )
    return float(hits.all()), float(logps.mean()), time.perf_counter() - started


def _cell(rows: Sequence[Row], scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    trials = len(rows)
    matches = sum(int(found) for found, _, _ in scores)
    return {
        "length": rows[0].length,
        "depth": rows[0].asked,
        "trials": trials,
        "matches": matches,
        "score": matches / trials,
        "mean_logp": sum(logp for _, logp, _ in scores) / trials,
        "answer_tokens": sum(len(row.answer) for row in rows) / trials,
        "seconds": sum(seconds for *_, seconds in scores) / trials,
        "rows": [
            {
                "key": row.key,
                "value": row.value,
                "depth": row.depth,
                "cut": row.cut,
                "tokens": row.length,
                "answer_tokens": len(row.answer),
                "match": bool(found),
                "logp": logp,
            }
            for row, (found, logp, _) in zip(rows, scores, strict=True)
        ],
    }
