"""Attention registered under transformers' own names: exact in float64, for models loaded before and after."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longspan.attention.schedule import Schedule
from longspan.errors import BatchError, ConfigError, LongspanError, ModelError, TopologyError
from longspan.integrations.deepspeed import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter, groups

pytestmark = pytest.mark.dist
REL = 1e-10
register: Any = UlyssesSPAttentionHF.register_with_transformers


def config(heads: int = 4, kv_heads: int = 2, **changed: Any) -> LlamaConfig:
    sizes: Any = {"hidden_size": 8 * heads, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 53}
    sizes["head_dim"] = 8
    return LlamaConfig(**sizes | changed, num_attention_heads=heads, num_key_value_heads=kv_heads)


def build(made: LlamaConfig) -> Any:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=torch.float64)


def rows(kind: str) -> dict[str, Tensor]:
    length = 23 if kind == "odd" else 24
    ids = torch.randint(53, (2, length), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(length).expand(2, -1)
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
    if kind == "packed":
        packed = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((5, 12, 7), (13, 10, 1))]
        batch["position_ids"] = torch.stack(packed)
    if kind == "padded":
        batch["attention_mask"] = (positions < torch.tensor([[24], [15]])).long()
        batch["labels"][1, 15:] = -100
    return batch


def summed(logits: Tensor, shift_labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")


def truth(made: LlamaConfig, kind: str) -> tuple[float, dict[str, Tensor]]:
    model, batch = build(made), rows(kind)
    labels = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    loss = summed(model(**batch, use_cache=False).logits, labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def train(size: int, shape: tuple[int, int], kind: str, checkpointing: bool = False) -> Any:
    """One step of a model that is made after the registration."""
    made = config(*shape)
    mpu = register(made, "sdpa", size, 2)
    try:
        model = build(made)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        loader = UlyssesSPDataLoaderAdapter(
            [rows(kind)], mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), size, "cpu"
        )
        calls = count_gathers()
        part = next(loader)
        labels = part.pop("shift_labels")
        calls.clear()
        loss = summed(model(**part, use_cache=False).logits, labels)
        loss.backward()
        if not checkpointing:
            assert len(calls) == 2 + (kind == "padded"), "once per micro-batch, not per layer"
        total = loss.detach().clone()
        for tensor in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=mpu.get_sequence_parallel_group())
        return total.item(), {name: p.grad for name, p in model.named_parameters()}
    finally:
        UlyssesSPAttentionHF.unregister()
        dist.all_gather = dist.distributed_c10d.all_gather


def count_gathers() -> list[str]:
    calls: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_gather")
        return dist.distributed_c10d.all_gather(*args, **kwargs)

    dist.all_gather = counted
    return calls


@pytest.mark.parametrize("kind", ["plain", "packed", "padded", "odd"])
@pytest.mark.parametrize(("size", "shape"), [(2, (4, 2)), (2, (5, 5)), (4, (2, 1)), (4, (4, 2)), (2, (3, 3))])
def test_rows_divided_over_ranks_give_the_gradients_of_whole_rows(
    run_ranks: Any, size: int, shape: tuple[int, int], kind: str
) -> None:
    true_loss, true_gradients = truth(config(*shape), kind)
    for loss, gradients in run_ranks(size, train, size, shape, kind):
        assert loss == pytest.approx(true_loss, rel=REL)
        for name, value in true_gradients.items():
            assert (gradients[name] - value).norm() <= REL * value.norm(), name


def train_windowed(kind: str) -> dict[str, float]:
    """One step of a model whose layers see a window, alone and divided."""
    from transformers import MistralConfig

    sizes: Any = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 53, "head_dim": 8}
    made: Any = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=6)
    true_loss, true_gradients = truth(made, kind)
    mpu = register(made, "sdpa", 2, 2)
    try:
        model = build(made)
        group = mpu.get_sequence_parallel_group()
        part = next(UlyssesSPDataLoaderAdapter([rows(kind)], mpu.get_sequence_parallel_rank(), group, 2, "cpu"))
        labels = part.pop("shift_labels")
        with patch.object(Schedule, "of", side_effect=Schedule.of) as schedules:
            loss = summed(model(**part, use_cache=False).logits, labels)
        assert schedules.call_count == 2, "one without the window and one with it, not one per layer"
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=group)
        errors = {
            n: float((p.grad - true_gradients[n]).norm() / true_gradients[n].norm())
            for n, p in model.named_parameters()
        }
        return errors | {"loss": abs(total.item() / true_loss - 1)}
    finally:
        UlyssesSPAttentionHF.unregister()


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_layers_with_a_window(run_ranks: Any, kind: str) -> None:
    for found in run_ranks(2, train_windowed, kind):
        assert max(found.values()) <= REL, found


def test_layers_that_are_recomputed_ask_nobody_again(run_ranks: Any) -> None:
    true_loss, true_gradients = truth(config(), "packed")
    for loss, gradients in run_ranks(2, train, 2, (4, 2), "packed", checkpointing=True):
        assert loss == pytest.approx(true_loss, rel=REL)
        for name, value in true_gradients.items():
            assert (gradients[name] - value).norm() <= REL * value.norm(), name


def loss_after_another_model() -> float:
    """Return a policy's loss on a part without targets, which a reference model of the same config saw before it."""
    made = config()
    register(made, "sdpa", 2, 2)
    try:
        reference, policy = build(made), build(made)
        ids, positions = torch.zeros(1, 8, dtype=torch.long), 8 * dist.get_rank() + torch.arange(8)[None]
        with torch.no_grad():
            reference(input_ids=ids, position_ids=positions, use_cache=False)
        labels = torch.full_like(ids, -100)
        return float(policy(input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels).loss)
    finally:
        UlyssesSPAttentionHF.unregister()


def test_each_model_is_guarded_whoever_saw_the_batch_before(run_ranks: Any) -> None:
    assert run_ranks(2, loss_after_another_model) == [0.0, 0.0]


def logits_of(model: Any, size: int, kind: str = "plain") -> Tensor:
    """This rank's logits of divided rows."""
    mpu = register(model, "sdpa", size, 2)
    part = next(
        UlyssesSPDataLoaderAdapter(
            [rows(kind)], mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), size, "cpu"
        )
    )
    part.pop("shift_labels")
    return model(**part, use_cache=False).logits


def entry_points(folder: str) -> None:
    """Names, paths, configs, models and adapters around them; loading before and after; two models at a time."""
    from peft import LoraConfig, get_peft_model

    own = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    teacher, student = build(config()), build(config(3, 3))
    if dist.get_rank() == 0:
        teacher.save_pretrained(folder)
    dist.barrier()
    whole = {id(m): m(**{k: v for k, v in rows("plain").items() if k != "labels"}).logits for m in (teacher, student)}
    half = slice(12 * dist.get_rank(), 12 * dist.get_rank() + 12)

    mpu = register(folder, "sdpa", 2, 2)
    assert register(folder, "sdpa", 2, 2) is mpu, "calling twice changes nothing"
    later = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float64)
    for model in (later, teacher):
        torch.testing.assert_close(logits_of(model, 2), whole[id(teacher)][:, half], rtol=REL, atol=REL)
    assert logits_of(get_peft_model(later, LoraConfig(target_modules=["q_proj"])), 2).shape == (2, 12, 53)
    torch.testing.assert_close(logits_of(student, 2), whole[id(student)][:, half], rtol=REL, atol=REL)
    torch.testing.assert_close(logits_of(teacher, 2), whole[id(teacher)][:, half], rtol=REL, atol=REL)
    with pytest.raises(ModelError, match="2 configs are registered.*register its model too"):
        build(config(4, 4))(input_ids=rows("plain")["input_ids"])

    guarded = teacher.loss_function
    UlyssesSPAttentionHF.unregister()
    UlyssesSPAttentionHF.unregister()
    assert (ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]) == own
    assert teacher.loss_function is not guarded and "_loss_function" not in vars(teacher)
    found = teacher(**{k: v for k, v in rows("plain").items() if k != "labels"}).logits
    assert torch.equal(found, whole[id(teacher)])


def test_every_way_to_name_a_model_and_to_load_it(run_ranks: Any, tmp_path: Any) -> None:
    pytest.importorskip("peft")
    run_ranks(2, entry_points, str(tmp_path))


def changed_in_place() -> None:
    """The same tensor of position ids, with other documents in it."""
    model, kinds = build(config()), ("plain", "packed")
    names = ("input_ids", "position_ids")
    whole = {kind: model(**{n: rows(kind)[n] for n in names}, use_cache=False).logits for kind in kinds}
    half = slice(12 * dist.get_rank(), 12 * dist.get_rank() + 12)
    positions = rows("plain")["position_ids"][:, half].clone()
    register(model, "sdpa", 2, 2)
    try:
        for kind in (*kinds, "plain"):
            positions.copy_(rows(kind)["position_ids"][:, half])
            found = model(input_ids=rows(kind)["input_ids"][:, half], position_ids=positions).logits
            torch.testing.assert_close(found, whole[kind][:, half], rtol=REL, atol=REL)
    finally:
        UlyssesSPAttentionHF.unregister()


def test_position_ids_that_change_in_place(run_ranks: Any) -> None:
    run_ranks(2, changed_in_place)


def in_eval() -> None:
    model = build(config())
    whole = {name: rows("padded")[name] for name in ("input_ids", "position_ids", "attention_mask")}
    expected = model.eval()(**whole).logits
    register(model, "sdpa", 2, 2, disable_in_eval=True)
    try:
        assert torch.equal(model(**whole).logits, expected)
        assert model.generate(whole["input_ids"], max_new_tokens=2).shape == (2, 26)
        divided = logits_of_part(model.train())
        assert divided.shape == (2, 12, 53)
    finally:
        UlyssesSPAttentionHF.unregister()


def logits_of_part(model: Any) -> Tensor:
    part = next(UlyssesSPDataLoaderAdapter([rows("plain")], dist.get_rank(), dist.group.WORLD, 2, "cpu"))
    part.pop("shift_labels")
    return model(**part, use_cache=False).logits


def test_eval_on_whole_rows(run_ranks: Any) -> None:
    run_ranks(2, in_eval)


def axes() -> dict[str, Any]:
    assert groups._get_sequence_parallel_world_size() == 1
    with pytest.raises(TopologyError, match="register_with_transformers"):
        groups._get_sequence_parallel_group()
    assert register(config(), "sdpa", 1, 1) is None
    mpu = register(config(), "sdpa", 2, 1)
    try:
        assert groups._get_sequence_parallel_group() is mpu.get_sequence_parallel_group()
        assert groups._get_sequence_data_parallel_group() is mpu.get_sequence_data_parallel_group()
        asked = ("sequence_parallel", "data_parallel", "sequence_data_parallel", "model_parallel")
        told = {axis: (getattr(mpu, f"get_{axis}_world_size")(), getattr(mpu, f"get_{axis}_rank")()) for axis in asked}
        for axis in ("sequence_parallel", "data_parallel", "sequence_data_parallel"):
            of_group = getattr(groups, f"_get_{axis}_world_size")(), getattr(groups, f"_get_{axis}_rank")()
            assert of_group == told[axis]
        for axis in ("sequence_parallel", "sequence_data_parallel", "model_parallel"):
            assert dist.get_world_size(getattr(mpu, f"get_{axis}_group")()) == told[axis][0]
        return told
    finally:
        UlyssesSPAttentionHF.unregister()


def test_the_axes_of_two_sequences_of_two_ranks(run_ranks: Any) -> None:
    for rank, told in enumerate(run_ranks(4, axes)):
        assert told == {
            "sequence_parallel": (2, rank % 2),
            "data_parallel": (2, rank // 2),
            "sequence_data_parallel": (4, rank),
            "model_parallel": (1, 0),
        }


def refused(kind: type[LongspanError], words: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=words):
        register(*args, **kwargs)
    assert not isinstance(ALL_ATTENTION_FUNCTIONS["sdpa"], type(register)), "nothing is left behind"
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def refusals() -> None:
    made, model = config(), build(config())
    refused(TopologyError, "sequence_parallel_size 3 does not divide the 2 processes", made, "sdpa", 3, 1)
    refused(ConfigError, "sequence_parallel_size must be an integer of at least 1, got 0", made, "sdpa", 0, 1)
    refused(ConfigError, "sequence_parallel_size.*got -2", made, "sdpa", -2, 1)
    refused(ConfigError, "micro_batch_size must be", made, "sdpa", 2, 0)
    refused(ConfigError, "Set seq_length", made, "sdpa", 2, 1, seq_length_is_variable=False)
    refused(ConfigError, "O\\(n²\\).*flash_attention_2.*sdpa", made, "eager", 2, 1)
    refused(ConfigError, "for generation", made, "paged|sdpa", 2, 1)
    refused(ConfigError, "no attention implementation 'spda'.*flash_attention_2.*sdpa", made, "spda", 2, 1)
    refused(ModelError, "uses attention.*'sdpa'.*is 'flash_attention_2'", model, "flash_attention_2", 2, 1)
    refused(ModelError, "'sdpa'.*'flash_attention_2'", model.config, "flash_attention_2", 2, 1)
    refused(ConfigError, "name, path, config or model, got int", 3, "sdpa", 2, 1)
    with pytest.raises(TypeError, match="lenght"):
        register(made, "sdpa", 2, 1, lenght=3)


def test_what_cannot_be_registered(run_ranks: Any) -> None:
    run_ranks(2, refusals)


def bad_batches() -> None:
    model, whole = build(config()), rows("plain")
    ids, positions = whole["input_ids"], whole["position_ids"]
    rank = dist.get_rank()
    half = slice(12 * rank, 12 * rank + 12)
    part = {"input_ids": ids[:, half], "position_ids": positions[:, half]}
    register(model, "sdpa", 2, 2, seq_length=24, seq_length_is_variable=False)
    try:
        assert model(**part).logits.shape == (2, 12, 53)
        with pytest.raises(BatchError, match=r"22 tokens per row \(11 on each of 2 ranks\).*registered for 24"):
            model(input_ids=ids[:, :11], position_ids=positions[:, 11 * rank : 11 * rank + 11])
        register(model, "sdpa", 2, 2, max_length=22, seq_length_is_variable=False)
        with pytest.raises(BatchError, match="registered for 22"):
            model(**part)
        register(model, "sdpa", 2, 2)
        with pytest.raises(BatchError, match=r"unlike shape: \[2, 12\], \[2, 11\]"):
            model(input_ids=ids[:, : 12 - rank], position_ids=positions[:, : 12 - rank])
        left = torch.ones(2, 12, dtype=torch.long)
        left[0, :3] = rank
        with pytest.raises(BatchError, match="padding before or between"):
            model(**part, attention_mask=left)
        square = torch.ones(2, 1, 12, 12, dtype=torch.bool)
        with pytest.raises(BatchError, match="mask per pair"):
            model(**part, attention_mask=square)
        with pytest.raises(BatchError, match="KV cache"):
            model.generate(ids[:, half], position_ids=positions[:, half], max_new_tokens=2)
    finally:
        UlyssesSPAttentionHF.unregister()


def test_batches_that_do_not_fit(run_ranks: Any) -> None:
    run_ranks(2, bad_batches)


def bad_models() -> None:
    from transformers import Llama4TextConfig, Qwen3NextConfig

    positions = 8 * dist.get_rank() + torch.arange(8)[None]
    part = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "position_ids": positions}
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "vocab_size": 9,
        "head_dim": 8,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    chunks: dict[str, Any] = {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 16}
    dynamic: Any = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    linear: dict[str, Any] = {
        "layer_types": ["full_attention", "linear_attention"],
        "num_experts": 0,
        "linear_num_value_heads": 2,
    }
    cases = [
        ("asks attention for chunks of 4 tokens", Llama4TextConfig(**sizes, **heads, **chunks)),
        ("rotary embeddings of type 'dynamic'", LlamaConfig(**sizes, **heads, rope_parameters=dynamic)),
        ("attention dropout 0.1", LlamaConfig(**sizes, **heads, attention_dropout=0.1)),
        ("layers of type 'linear_attention'", Qwen3NextConfig(**sizes, **heads, **linear, linear_num_key_heads=2)),
    ]
    for words, made in cases:
        register(made, "sdpa", 2, 1)
        try:
            model = build(made).train()
            with pytest.raises(ModelError, match=words):
                model(**part, use_cache=False)
        finally:
            UlyssesSPAttentionHF.unregister()


def test_models_that_would_not_be_exact(run_ranks: Any) -> None:
    run_ranks(2, bad_models)
