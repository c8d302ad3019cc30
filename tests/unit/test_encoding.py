"""Prompts, completions and conversations: their tokens are the text's, and exactly what was said is a target."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from longspan.errors import ConfigError
from longspan.integrations.encoding import Encoder
from longspan.integrations.tokenizer import byte_tokenizer, load_tokenizer

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
CHATML = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    TOOLS + "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + CALLS + "<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (  # leaves thoughts out of all turns but the last, as reasoning models do
    "{% for m in messages %}<|{{ m.role }}|>{% if m.thought and loop.last %}({{ m.thought }}){% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = ["the quick brown fox", "2 + 2 = 4\n\n  indented", "naïve 😀 text", "a  b   c\n", "don't stop"]


def bpe(metaspace: bool = False, trims: bool = False, closes: bool = False) -> PreTrainedTokenizerFast:
    """Make a small tokenizer with merges: of bytes, as most have, or with spaces that stand before words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=metaspace))
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    if metaspace:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()  # pyright: ignore
        alphabet = sorted({c for text in TEXTS for c in text} | {chr(c) for c in range(32, 127)})
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
        tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if trims:
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # pyright: ignore
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*TEXTS, *(f" {text}" for text in TEXTS)] * 3, trainer)
    if closes:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "bpe": bpe(),
    "trimmed": bpe(trims=True),
    "metaspace": bpe(metaspace=True),
    "closed": bpe(closes=True),
}


def encoder(name: str, template: str | None = None, targets: str = "assistant") -> Encoder:
    tokenizer = TOKENIZERS[name]
    tokenizer.chat_template = template
    return Encoder(tokenizer, targets)


def said(role: str, content: str, **rest: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **rest}


def learnt(ids: list[int], mask: list[bool] | None, name: str) -> str:
    assert mask is not None
    assert len(mask) == len(ids)
    return str(TOKENIZERS[name].decode([i for i, target in zip(ids, mask, strict=True) if target]))


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_completion_is_learnt_with_its_end_and_its_prompt_is_not(name: str) -> None:
    ids, mask = encoder(name).completion("the quick", " brown fox")
    tokenizer = TOKENIZERS[name]
    assert ids == encoder(name).text("the quick brown fox")
    assert ids.count(tokenizer.eos_token_id) == 1  # pyright: ignore[reportArgumentType]
    assert ids[-1] == tokenizer.eos_token_id
    assert learnt(ids, mask, name).strip() == "brown fox" + tokenizer.eos_token  # pyright: ignore[reportOperatorIssue]
    assert encoder(name, targets="all").completion("the quick", " brown fox") == (ids, None)


@pytest.mark.parametrize("name", ["bytes", "bpe", "trimmed", "closed"])
@given(st.sampled_from(TEXTS), st.sampled_from(TEXTS), st.sampled_from(["", " ", "\n", "  "]))
@hypothesis_settings(max_examples=25)
def test_prompts_have_the_tokens_that_they_have_alone(name: str, prompt: str, completion: str, space: str) -> None:
    """Where a token would span both, the prompt ends as it does when the model is asked."""
    ids, mask = encoder(name).completion(prompt + space, completion)
    assert mask is not None
    tokenizer, count = TOKENIZERS[name], mask.index(True)
    alone: Any = tokenizer(prompt + space)["input_ids"]
    assert ids[:count] == (alone[:-1] if name == "closed" else alone)
    assert all(mask[count:])
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt + space + completion


def test_a_tokenizer_that_puts_a_space_before_words_is_not_given_a_completion_it_would_change() -> None:
    with pytest.raises(ValueError, match="move the white space"):
        encoder("metaspace").completion("the quick ", "brown fox")


def test_an_empty_prompt_leaves_all_to_the_completion() -> None:
    ids, mask = encoder("bytes").completion("", "ab")
    assert (ids, mask) == ([97, 98, 256], [True] * 3)


CHAT = [
    said("system", "be brief"),
    said("user", "the quick"),
    said("assistant", "brown fox"),
    said("user", "2 + 2 ="),
    said("assistant", "4"),
]


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_what_the_assistant_says_is_learnt(name: str) -> None:
    ids, mask = encoder(name, CHATML).chat(CHAT)
    found = learnt(ids, mask, name)
    found = found.replace(" \n", "\n") if name == "metaspace" else found  # it puts a space after special tokens
    assert found.split("<|im_end|>") == ["brown fox", "\n4", "\n"]
    marked = encoder(name, MARKED)
    assert learnt(*marked.chat(CHAT), name) == "brown fox<|end|>4<|end|>"
    everything: Any = TOKENIZERS[name](
        "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in CHAT), add_special_tokens=False
    )
    assert encoder(name, MARKED, "all").chat(CHAT) == (everything["input_ids"], None)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.sampled_from(TEXTS)), min_size=1, max_size=5)
)
@hypothesis_settings(max_examples=25)
def test_targets_are_the_differences_between_prefixes(name: str, turns: list[tuple[str, str]]) -> None:
    """The slow twin tokenizes each prefix by itself."""
    messages = [said("user", "hi"), *(said(role, content) for role, content in turns)]
    coded, tokenizer = encoder(name, CHATML), TOKENIZERS[name]

    def tokens(count: int, asking: bool) -> list[int]:
        found: Any = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=asking, return_dict=True)
        return found["input_ids"]

    whole = tokens(len(messages), False)
    expected = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = tokens(index, True), tokens(index + 1, False)
            assert whole[: len(after)] == after
            assert after[: len(before)] == before
            expected[len(before) : len(after)] = [True] * (len(after) - len(before))
    assert coded.chat(messages) == (whole, expected)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_before_the_completion_are_context(template: str) -> None:
    ids, mask = encoder("bytes", template).chat(CHAT, context=4)
    assert learnt(ids, mask, "bytes").strip() in ("4<|im_end|>", "4<|end|>")


def test_a_template_that_rewrites_earlier_turns_is_refused_with_ways_out_that_work() -> None:
    thinking = [said("user", "a"), said("assistant", "b", thought="hm"), said("user", "c"), said("assistant", "d")]
    forgetful = encoder("bytes", FORGETFUL)
    with pytest.raises(ValueError, match=r"writes message 2 otherwise when more follow.*`completion`.*generation"):
        forgetful.chat(thinking)
    assert learnt(*forgetful.chat(thinking[:2]), "bytes") == "(hm)b<|end|>"
    assert learnt(*forgetful.chat(thinking, context=3), "bytes") == "d<|end|>"
    assert encoder("bytes", FORGETFUL, "all").chat(thinking)[1] is None


def test_a_template_that_asks_otherwise_than_it_writes_is_refused() -> None:
    asks = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    with pytest.raises(ValueError, match="does not continue what it writes to ask for message 2"):
        encoder("bytes", asks).chat([said("user", "a"), said("assistant", "b")])


@pytest.mark.parametrize("name", ["bpe", "trimmed"])
def test_a_token_across_the_border_is_refused(name: str) -> None:
    joined = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="lies across the border"):
        encoder(name, joined).chat([said("user", "the qu"), said("assistant", "ick")])
    with pytest.raises(ValueError, match="lies across the border"):
        encoder(name, joined).chat([said("user", "the "), said("assistant", "quick")])
    ids, mask = encoder(name, joined).chat([said("user", "the"), said("assistant", " quick")])
    assert learnt(ids, mask, name) == " quick"


def test_tools_reach_the_template() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = said("assistant", "", tool_calls=[call])
    assert learnt(*encoder("bytes", CHATML).chat([said("user", "x"), turn]), "bytes") == '[add {"a": 1}]<|im_end|>\n'
    tools = [{"type": "function", "function": {"name": "add"}}]
    ids, _ = encoder("bytes", MARKED).chat(CHAT, tools)
    written = str(TOKENIZERS["bytes"].decode(ids))
    assert written.startswith('[{"type": "function", "function": {"name": "add"}}]<|system|>')


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[0].content + 3 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 // 0 }}",
        "{{ '%(name)s' % {} }}",
        "{{ 'a' | dictsort }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_what_a_template_cannot_write_is_said(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template cannot write it"):
        encoder("bytes", template).chat(CHAT)


def test_parts_that_a_template_prints_as_they_are_do_not_pass() -> None:
    parts = [said("user", "x"), {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}]
    with pytest.raises(ValueError, match="cannot write `content` in parts"):
        encoder("bytes", CHATML).chat(parts)
    reads = CHATML.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    )
    assert learnt(*encoder("bytes", reads).chat(parts), "bytes") == "hi<|im_end|>\n"


CALLING = said("assistant", "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([said("user", "x"), CALLING, said("user", "y")], None, "leaves `tool_calls` out"),
        ([said("system", "be brief"), said("user", "x")], None, "leaves out what message 1 says"),
        ([said("user", "x")], [{"function": {"name": "add"}}], "leaves `tools` out"),
        ([said("user", "x")], [{"name": 3}], "leaves `tools` out"),
    ],
)
def test_what_a_template_leaves_out_is_refused(messages: list[Any], tools: Any, reason: str) -> None:
    plain = "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    for targets in ("assistant", "all"):
        with pytest.raises(ValueError, match=reason):
            encoder("bytes", plain, targets).chat(messages, tools)


def test_reasoning_may_be_left_out_and_texts_may_be_escaped() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] | tojson }}{% endfor %}"
    ids, _ = encoder("bytes", template, "all").chat([said("user", 'a "b"\n'), said("assistant", "<think>c</think>d")])
    assert TOKENIZERS["bytes"].decode(ids) == '<|user|>"a \\"b\\"\\n"<|assistant|>"d"'


def families() -> list[Path]:
    trl = importlib.util.find_spec("trl")
    return [] if trl is None else sorted(Path(str(trl.origin)).parent.glob("chat_templates/*.jinja"))


@pytest.mark.parametrize("file", families(), ids=lambda file: file.stem)
def test_templates_of_real_families_teach_what_was_said_or_are_refused(file: Path) -> None:
    template, accepted = file.read_text(encoding="utf-8"), []
    call = CALLING["tool_calls"]
    chats: dict[str, tuple[list[Any], Any, int, list[str]]] = {
        "one": ([said("user", "the quick"), said("assistant", "brown fox")], None, 0, ["brown fox"]),
        "two": (CHAT[1:], None, 0, ["brown fox", "4"]),
        "last": (CHAT[1:], None, 3, ["4"]),
        "called": (
            [*CHAT[3:4], CALLING, said("tool", "3.9", name="add"), said("assistant", "4")],
            call,
            0,
            ["add", "4"],
        ),
    }
    for name, (messages, tools, context, expected) in chats.items():
        try:
            ids, mask = encoder("bpe", template).chat(messages, tools, context)
        except ValueError as error:
            assert str(error).startswith(("the chat template", "a token of the chat"))
            continue
        accepted.append(name)
        found = learnt(ids, mask, "bpe")
        assert all(text in found for text in expected), name
        assert not any(text in found for text in ("the quick", "2 + 2", "3.9")), name
        assert context == 0 or "brown fox" not in found
    in_parts = ("idefics", "llava", "smolvlm")
    asks_otherwise = ("deepseek_r1_distill", "deepseekv3", "nemotron")
    unmarked = "_training" not in file.stem
    if not file.stem.startswith(in_parts) and not (unmarked and file.stem.startswith(asks_otherwise)):
        assert {"one", "last"} <= set(accepted)


def test_a_template_from_a_file_is_part_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    tokenizer = load_tokenizer("bytes", str(tmp_path / "chat.jinja"))
    assert Encoder(tokenizer).has_template
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).chat_template == CHATML
    assert not Encoder(load_tokenizer("bytes")).has_template
    with pytest.raises(ConfigError, match=r"data\.chat_template: cannot read"):
        load_tokenizer("bytes", str(tmp_path / "none"))
