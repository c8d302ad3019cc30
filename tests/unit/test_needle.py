"""Rows of a needle evaluation, what is refused, and what its command line writes and shows."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.cli import evaluate as command
from longspan.errors import ConfigError, DataError, TrainingError
from longspan.evaluate.haystack import STDLIB, Haystack
from longspan.evaluate.needle import check_lengths, evaluate
from longspan.evaluate.prompts import Prompts
from longspan.evaluate.settings import NeedleSettings
from longspan.evaluate.source import Source
from longspan.integrations.tokenizer import byte_tokenizer
from longspan.integrations.transformers import prepare
from needles import plain_scores, prompts, small_model, text, tokenizer
from test_cli_errors import expect_error, longspan

CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def in_text(made: Prompts) -> list[tuple[Any, str]]:
    return [(row, made.tokenizer.decode(made.ids(row).tolist())) for row in made.rows()]


def words(length: int = 600, **changes: Any) -> Prompts:
    """Make rows of the default sentences, a byte per token."""
    made = byte_tokenizer()
    settings = {"lengths": (length,), "depths": (0.0, 10.0, 50.0, 99.0, 100.0), "trials": 2, **changes}
    return Prompts(made, Haystack.of([text()], made, 1 << 20), NeedleSettings(**settings))


@pytest.mark.parametrize("length", [300, 301, 1500])
def test_rows_have_exactly_the_asked_length_and_depth(length: int) -> None:
    made = words(length)
    assert len(made.rows()) == 10
    for row, said in in_text(made):
        assert len(made.ids(row)) == row.length == length
        needle = f"\nThe access code of the {row.key} is {row.value}.\n"
        question = f"\nWhat is the access code of the {row.key} that the text above mentions?\n"
        ending = f"{question}The access code of the {row.key} is {row.value}"
        assert said.endswith(ending)
        before, found, after = said.removesuffix(ending).partition(needle)
        assert found and (len(before), len(after)) == (row.before, row.after)
        assert row.before + row.after == length - len(needle) - len(ending)
        assert abs(row.depth - row.asked) <= 2.1
        assert row.asked not in (0, 100) or row.depth == row.asked
        assert (row.cut == "end") == (row.asked in (0, 100))
        assert made.tokenizer.decode(row.answer) == f" {row.value}"
        assert len(row.value) == 7


def test_haystacks_are_cut_at_lines_sentences_or_tokens() -> None:
    for row, said in in_text(words(3000, depths=(20.0, 50.0, 80.0))):
        before = said.partition("\nThe access code")[0]
        assert row.cut == "line" and before.endswith(".\n")
        assert text().startswith(before[:20], row.start), "a stretch begins where a line does"
    made = byte_tokenizer()
    long_line = "one two. three four? " * 100
    haystack = Haystack.of([long_line], made, 1)
    settings = NeedleSettings((1000,), (50.0,), 1)
    row = Prompts(made, haystack, settings).rows()[0]
    assert row.cut == "sentence"
    assert str(made.decode(haystack.take(row.start, row.before).tolist())).endswith((".", "?"))
    row = Prompts(made, Haystack.of(["é" * 3000], made, 1), settings).rows()[0]
    assert row.cut == "token"
    assert row.before % 2 == 0, "a character of two bytes stays whole"


def test_borders_of_tokens_that_hold_several_symbols() -> None:
    """A newline that shares its token with the indentation after it still begins a line."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["def", " f", ":", "\n    ", "return", " 1", ".", " Then", "\n"]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate([*pieces, "?"])}, unk_token="?"))
    from tokenizers import Regex

    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n    | ?\w+|[:.\n]"), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")
    haystack = Haystack.of(["def f:\n    return 1. Then 1\ndef f:\n"], made, 1)
    starts = [made.decode([int(haystack.ids[place])]) for place in haystack.lines]
    assert (haystack.lines.tolist(), starts) == ([0, 4, 10], ["def", "return", "def"])
    assert [made.decode([int(haystack.ids[place])]) for place in haystack.sentences] == [" Then"]
    assert haystack.whole.tolist() == list(range(len(haystack)))


def test_a_line_whose_first_character_is_parted_is_no_border() -> None:
    """The newline shares a token with the first of two bytes of the character after it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = {k: v for k, v in byte_tokenizer().get_vocab().items() if v < 256}
    core = Tokenizer(models.BPE(vocab={**symbols, "\u010a\u00c3": 256}, merges=[("\u010a", "\u00c3")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    haystack = Haystack.of(["ab\n\u00e9c\nd"], PreTrainedTokenizerFast(tokenizer_object=core), 1)
    assert haystack.ids.tolist() == [97, 98, 256, 0xA9, 99, 10, 100]
    assert haystack.lines.tolist() == [0, 6]
    assert haystack.whole.tolist() == [0, 1, 2, 4, 5, 6]


def test_short_haystacks_go_round() -> None:
    made = tokenizer()
    haystack = Haystack.of(["ab cd.\n", "ef.\n"], made, 1 << 20)
    assert (len(haystack), haystack.files) == (11, 2)
    assert haystack.lines.tolist() == [0, 7]
    assert np.array_equal(haystack.take(7, 15), np.concatenate([haystack.ids[7:], haystack.ids])[:15])
    assert haystack.cut(10, 2) == (1, "line")  # the end, where the first line begins again
    assert haystack.cut(22 + 8, 2) == (-1, "line")
    assert haystack.cut(3, 2) == (0, "token")
    assert Haystack.of(["ab cd.\n", "ef.\n"], made, 5).files == 1


def test_tokenizers_that_do_not_tell_where_their_tokens_stand() -> None:
    class Slow:
        is_fast = False
        known = tokenizer()

        def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> Any:
            return {"input_ids": self.known(text, add_special_tokens=add_special_tokens, verbose=verbose)["input_ids"]}

    made = prompts(Slow(), lengths=(200,))
    assert {row.cut for row in made.rows()} == {"token", "end"}
    assert all(len(made.ids(row)) == 200 and abs(row.depth - row.asked) < 1 for row in made.rows())


def test_the_same_seed_makes_the_same_rows() -> None:
    def ids(**changes: Any) -> list[list[int]]:
        made = prompts(**changes)
        return [made.ids(row).tolist() for row in made.rows()]

    assert ids() == ids() != ids(seed=1)
    assert len({tuple(row) for row in ids()}) == 24
    assert ids(lengths=(64,)) == ids()[12:], "a cell does not depend on the others"


def test_chat_templates_hold_haystack_and_question() -> None:
    made = byte_tokenizer()
    made.chat_template = CHAT
    for row, said in in_text(Prompts(made, words().haystack, words(chat=False, depths=(40.0,)).settings)):
        assert "<user>" not in said and row.length == 600
    chat = NeedleSettings((600,), (40.0,), 1, chat=True)
    ((row, said),) = in_text(Prompts(made, words().haystack, chat))
    assert len(said) == 600 and said.startswith("<user>")
    assert said.endswith(f"mentions?\n</><model>The access code of the {row.key} is {row.value}")
    made.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        Prompts(made, words().haystack, chat)
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="2 times, not once"):
        Prompts(made, words().haystack, chat)
    made.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ConfigError, match="cannot be used: no system"):
        Prompts(made, words().haystack, chat)


def test_special_tokens_stand_in_front() -> None:
    from tokenizers import processors

    made = tokenizer()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    first, last = (made.vocab[token] for token in ("<s>", "</s>"))
    core = made.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", first), ("</s>", last)]
    )
    rows = prompts(made)
    for row in rows.rows():
        ids = rows.ids(row).tolist()
        assert ids[0] == first and first not in ids[1:] and last not in ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths must be one or more"),
        ({"lengths": (0,)}, "lengths must be numbers of tokens"),
        ({"lengths": (64, 64)}, "each once"),
        ({"depths": (50.0, 100.5)}, "from 0 to 100 percent of the haystack, got 100.5"),
        ({"depths": (-1.0,)}, "got -1"),
        ({"depths": (math.nan,)}, "got nan"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"digits": 0}, "digits must be at least 1"),
        ({"needle": "it is here"}, "needle must hold {value}"),
        ({"needle": "{value} {city}"}, "no other field"),
        ({"needle": "{value!r}"}, "no other field"),
        ({"needle": "{value"}, "needle is not a template"),
        ({"question": "is it {value}?"}, "question may hold {key} and no other field"),
        ({"answer": "{value} or {value}"}, "once"),
        ({"lengths": (7,)}, "needle, question and answer take 7. Ask for lengths above 7"),
    ],
)
def test_settings_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prompts(**changes).rows()
    assert message in str(caught.value)


def test_answers_that_cannot_be_told_apart() -> None:
    """A tokenizer that joins what stands before the value with the value."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(["#", *"0123456789?.a", *(f"#{i}" for i in range(10))])}
    joins = [("#", str(i)) for i in range(10)]
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=joins)))
    settings = NeedleSettings((30,), (50.0,), 1, needle="#{value}.", question="?", answer="#{value}", digits=1)
    with pytest.raises(ConfigError, match="cannot be told from those before it"):
        Prompts(made, Haystack.of(["a" * 50], made, 50), settings).rows()


def test_haystacks_that_cannot_be_used(tmp_path: Path) -> None:
    made = byte_tokenizer()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="The haystack is empty: 1 file without a token"):
        Haystack.read([str(tmp_path / "empty.txt")], made, 10)
    with pytest.raises(DataError, match=r"haystack: .*binary.txt is not UTF-8 text \(byte 2\)"):
        Haystack.read([str(tmp_path / "b*.txt")], made, 10)
    with pytest.raises(DataError, match=r"haystack: .*none.txt matches no file"):
        Haystack.read([str(tmp_path / "none.txt")], made, 10)
    with pytest.raises(ConfigError, match=r"haystack: \$\{home\} means nothing"):
        Haystack.read(["${home}/*.txt"], made, 10)
    assert len(Haystack.read([STDLIB], made, 5000)) >= 5000


def test_rows_beyond_what_the_model_knows() -> None:
    model = small_model()
    check_lengths(model.config, NeedleSettings((128,)))
    with pytest.raises(ConfigError, match="129 tokens are longer than the 128 positions"):
        check_lengths(model.config, NeedleSettings((64, 129)))
    check_lengths(model.config, NeedleSettings((129,), allow_longer=True))
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    check_lengths(model.config, NeedleSettings((256,)))
    handle = prepare(small_model(), 1)
    with pytest.raises(ConfigError, match="more than|longer than the 128 positions"):
        evaluate(handle, prompts(lengths=(129,)))
    assert len(evaluate(handle, prompts(lengths=(131,), depths=(50.0,), trials=1, allow_longer=True))) == 1


def test_tokens_that_the_model_does_not_know_and_scores_that_are_not_finite() -> None:
    with pytest.raises(ConfigError, match="token id 2[0-9], but the model's vocabulary ends at 19"):
        evaluate(prepare(small_model(vocab_size=20), 1), prompts())
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(TrainingError, match="not finite on a row of 41 tokens, needle at 0%"):
        evaluate(prepare(model, 1), prompts())


def test_where_models_come_from(tmp_path: Path) -> None:
    assert Source.of("tiny-llama") == Source("tiny-llama")
    assert Source.of("tiny-llama").tokenizer().vocab_size == 256
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has saved no model"):
        Source.of(str(run))
    small_model(1).save_pretrained(run / "model")
    source = Source.of(str(run))
    assert source == Source(str(run / "model"))
    assert source.config().hidden_size == 32
    assert torch.equal(source.model("float64").lm_head.weight, small_model(1).lm_head.weight.double())
    with pytest.raises(ConfigError, match="tokenizer: cannot load"):
        source.tokenizer()
    assert source.tokenizer("bytes").vocab_size == 256
    with pytest.raises(ConfigError, match="Did you mean the preset tiny-llama"):
        Source.of("tiny-lama").config()


def test_adapters_are_folded_in(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    small_model(1).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "adapters")
    base = Source.of(str(tmp_path / "base")).model("float32")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapters")
    source = Source.of(str(tmp_path / "adapters"))
    ids = torch.arange(20)[None]
    assert source.adapted and source.config().hidden_size == 32 and source.tokenizer().vocab_size == 23
    with torch.no_grad():
        wanted = adapted.eval()(input_ids=ids).logits
        assert torch.allclose(source.model("float32")(input_ids=ids).logits, wanted, atol=1e-5)
        assert not torch.allclose(small_model(1).eval()(input_ids=ids).logits, wanted, atol=1e-3)


BAD_FLAGS = {
    "--lengths 1.5K": "--lengths 1.5K is not a size",
    "--lengths 4K,": "--lengths '' is not a size",
    "--depths 0,half": "--depths: 'half' is not a number",
    "--depths 101": "depths must lie from 0 to 100",
    "--sp 2 --ulysses 3": "--ulysses x --ring must make --sp",
    "--sp 2 --nproc 3": "--nproc must be a multiple of --sp 2",
    "--device tpu": "--device must be auto, cpu or cuda",
    "--dtype float16": "dtype must be one of",
    "--engine zero-3": "engine must be single or fsdp2",
    "--tile-tokens 0": "tile_tokens must be at least 1",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_flags_start_nothing(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "start", lambda job: pytest.fail("started"))
    out = tmp_path / "out"
    done = longspan("eval", "needle", "--model", "tiny-llama", "--out", out, *flags.split())
    expect_error(done, 2, BAD_FLAGS[flags])
    assert not out.exists()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run jobs of one process here."""
    monkeypatch.setattr(command, "start", lambda job: job.run(torch.device("cpu")))


@pytest.mark.usefixtures("in_process")
def test_the_command_writes_and_shows_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hay.txt").write_text("Rain fell. " * 9)
    out = tmp_path / "out"
    flags = ["eval", "needle", "--model", "tiny-llama", "--lengths", "300,256", "--depths", "100,0", "--trials", "1"]
    flags += ["--haystack", str(tmp_path / "*.txt"), "--out", str(out), "--tile-tokens", "100"]
    code, said, err = longspan(*flags)
    assert code == 0, err
    result = json.loads((out / "needle.json").read_text())
    assert [(c["length"], c["depth"]) for c in result["cells"]] == [(256, 0), (256, 100), (300, 0), (300, 100)]
    assert result["score"] == 0 and result["cells"][0]["answer_tokens"] == 8 and result["cells"][0]["mean_logp"] < -2
    assert result["haystack"] == {"files": 1, "tokens": 99, "repeated": True}
    assert result["versions"].keys() >= {"longspan", "torch", "transformers"}
    assert result["settings"]["needle"]["seed"] == 0 and result["settings"]["tile_tokens"] == 100
    assert (out / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert said.splitlines()[-1] == f"out: {out}"
    assert "begun again" in said and "tiny-llama: 0.0% found" in said
    assert all(line.split()[0] in ("0%", "100%") for line in said.splitlines()[2:4]), said

    expect_error(longspan(*flags), 2, "holds an evaluation already", "--overwrite")
    (out / "needle.png").unlink()
    missing = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else missing(name))
    expect_error(longspan(*flags, "--overwrite"), 2, "pip install 'longspan[eval]'", "--no-plot")
    code, said, _ = longspan(*flags, "--overwrite", "--no-plot", "--json")
    assert code == 0 and not (out / "needle.png").exists()
    assert json.loads(said) == json.loads((out / "needle.json").read_text())
    expect_error(longspan(*flags[:-4], "--out", tmp_path / "hay.txt", "--no-plot"), 2, "is a file")


@pytest.mark.usefixtures("in_process")
def test_lengths_beyond_a_model_are_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "model", lambda self, dtype: pytest.fail("built"))
    flags = ["eval", "needle", "--model", "tiny-llama", "--no-plot", "--out", str(tmp_path / "out")]
    expect_error(
        longspan(*flags, "--lengths", "1M"), 2, "1,048,576 tokens are longer than the 131,072", "--allow-longer"
    )
    expect_error(longspan(*flags, "--lengths", "100"), 2, "has no room for a haystack")
    assert not (tmp_path / "out").exists()


def learn_to_copy(model: Any, handle: Any, seed: int = 5, most_steps: int = 600) -> None:
    """Train on rows of 64 tokens, needles at 32 depths each step, to say the one digit that stands in the text."""
    depths, trials = tuple(100 * i / 31 for i in range(32)), 100
    made = prompts(lengths=(64,), depths=depths, trials=trials, seed=seed)
    rows = made.rows()
    batches = [torch.stack([made.ids(row) for row in rows[trial::trials]]) for trial in range(trials)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    for step in range(most_steps):
        ids = batches[step % trials]
        labels = torch.full_like(ids, -100)
        labels[:, -2:] = ids[:, -2:]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (step + 1) / 10)
        loss = model(**handle.shard({"input_ids": ids, "labels": labels})).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if float(loss.detach()) < 0.002:
            return


@pytest.mark.usefixtures("in_process")
def test_a_trained_model_finds_what_it_did_not_find_before(tmp_path: Path) -> None:
    """Needles, depths and haystacks of the evaluation are not those of training; a guess is right once in ten."""
    unseen = prompts(seed=999)
    model = small_model(1, num_hidden_layers=1, tie_word_embeddings=True, initializer_range=0.2)
    handle = prepare(model, 1)

    def score() -> tuple[float, float]:
        cells = evaluate(handle, unseen)
        return float(np.mean([c["score"] for c in cells])), float(np.mean([c["mean_logp"] for c in cells]))

    before = score()
    learn_to_copy(model, handle)
    after = score()
    assert before[0] <= 0.2 and before[1] < -1.1, before
    assert after[0] >= 0.95 and after[1] > -0.1, after

    handle.remove()
    truth = plain_scores(model.eval(), [(row, unseen.ids(row)) for row in unseen.rows()])
    assert np.mean([match for _, match in truth]) == after[0], "greedy decoding by `generate` answers the same"

    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "hay.txt").write_text(text())
    flags = ["--model", tmp_path, "--haystack", tmp_path / "hay.txt", "--out", tmp_path / "out", "--no-plot", "--json"]
    flags += ["--lengths", "41,64", "--depths", "0,30,100", "--trials", "4", "--seed", "999", "--digits", "1"]
    flags += ["--needle", "#{value}.", "--question", "?", "--answer", "#{value}."]
    code, said, err = longspan("eval", "needle", *flags)
    assert code == 0, err
    assert json.loads(said)["score"] == after[0]
