"""Small needle-in-a-haystack evaluations, and what the plain model gives for their rows: logits and real decoding."""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longspan.evaluate.haystack import Haystack
from longspan.evaluate.prompts import Prompts, Row
from longspan.evaluate.settings import NeedleSettings

SYMBOLS = "0123456789#? .\nabcdefg"
TEMPLATES: dict[str, Any] = {"needle": "#{value}.", "question": "?", "answer": "#{value}.", "digits": 1}


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token per symbol."""
    vocabulary = {symbol: i for i, symbol in enumerate(["<unk>", *SYMBOLS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def text(lines: int = 200) -> str:
    """Write lines of words of a few letters."""
    draw = random.Random(7)
    words = ("".join(draw.choices("abcdefg", k=draw.randint(2, 6))) for _ in iter(int, 1))
    return "".join(" ".join(next(words) for _ in range(4)) + ".\n" for _ in range(lines))


def prompts(made: Any = None, **changes: Any) -> Prompts:
    """Make the rows of a small evaluation."""
    made = tokenizer() if made is None else made
    asked = {"lengths": (41, 64), "depths": (0.0, 30.0, 100.0), "trials": 4, **TEMPLATES, **changes}
    return Prompts(made, Haystack.of([text()], made, 1 << 20), NeedleSettings(**asked))


def small_model(seed: int = 74, **changes: Any) -> LlamaForCausalLM:
    """Build a model that knows the tokenizer's symbols; in float64, seed 74 finds 2 of 24 needles by chance."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": len(SYMBOLS) + 1, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 8}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.3, "pad_token_id": 0, **changes}))


def plain_scores(model: Any, rows: list[tuple[Row, Tensor]]) -> list[tuple[float, bool]]:
    """Return the mean log-probability of each row's answer, from whole logits, and whether `generate` answers so."""
    found = []
    with torch.no_grad():
        for row, ids in rows:
            count = len(row.answer)
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            logps = logits.log_softmax(-1)[-count - 1 : -1].gather(-1, ids[-count:, None])
            prompt = ids[None, :-count]
            options: Any = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
            said = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            found.append((float(logps.mean()), said[0, -count:].tolist() == list(row.answer)))
    return found
