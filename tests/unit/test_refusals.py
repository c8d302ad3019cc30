"""What a prepared model, or `prepare`, refuses: one clear error each, before anything wrong is computed."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import longspan
from longspan.engines import Origin
from longspan.errors import BatchError, ConfigError, KernelError, ModelError, TopologyError
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model

CPU = torch.device("cpu")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = ["full_attention"] * 2
SLIDING = ["full_attention", "sliding_attention"]


def model(config: hf.PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def llama(**changed: Any) -> Any:
    return model(hf.LlamaConfig(**(SIZES | changed)))


def batch(**fields: Any) -> dict[str, Any]:
    ids = torch.arange(1, 13)[None]
    return {"input_ids": ids, "labels": ids, **fields}


def mamba_sizes() -> dict[str, Any]:
    return {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}


def unknown_logits(**fields: float) -> Any:
    """A model that moves its logits by what its config does not say."""
    made = llama(**fields)
    plain = made.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    made.forward = forward
    return made


def gemma3n() -> Any:
    """Layers that reuse the keys of others, and pass several hidden states each; without windows and softcap."""
    sizes: dict[str, Any] = SIZES | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 32,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [24] * 4,
    }
    made = model(hf.Gemma3nTextConfig(**sizes))
    object.__setattr__(made.config, "final_logit_softcapping", None)
    return made


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}


def qwen3_next(kind: type) -> Any:
    """Build a model whose first mixer is of another class."""
    made = model(hf.Qwen3NextConfig(**SIZES, **LINEAR, num_experts=0))
    made.model.layers[0].linear_attn.__class__ = kind
    return made


def adapted_conv() -> Any:
    """Build a model with LoRA on the convolution of its first mixer."""
    made = model(hf.Qwen3NextConfig(**SIZES, **LINEAR, num_experts=0))
    net = made.model.layers[0].linear_attn
    options = {"r": net.conv1d.groups, "target_modules": ["conv1d"], "layers_to_transform": [0]}
    return get_peft_model(made, LoraConfig(**options))


def doubled(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return 2 * Qwen3NextGatedDeltaNet.forward(self, hidden_states, **kwargs)


def windowed(layer: int, window: int) -> Any:
    """A model of which one layer says it has a window of its own; by its mask, the second has one of 4 tokens."""
    made = model(hf.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, layer_types=SLIDING))
    made.model.layers[layer].self_attn.sliding_window = window
    return made


def other_sinks() -> Any:
    made = model(hf.GptOssConfig(**SIZES, num_local_experts=2, layer_types=FULL, sliding_window=64))
    made.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(3))
    return made


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "two-windows": (
        lambda: windowed(1, 5),
        r"Qwen3Attention of layer 1 asks attention for sliding_window=5, but its mask has a window of 4 tokens",
    ),
    "window-without-a-mask": (
        lambda: windowed(0, 4),
        r"Qwen3Attention of layer 0 asks attention for sliding_window=4, but its mask sees all tokens",
    ),
    "window-of-nothing": (lambda: windowed(0, 0), r"layer 0 asks for sliding_window=0; a window is a whole number"),
    "chunks": (
        lambda: model(
            hf.Llama4TextConfig(
                **SIZES,
                num_local_experts=2,
                attention_chunk_size=4,
                intermediate_size_mlp=24,
                interleave_moe_layer_step=9,
            )
        ),
        "Llama4TextAttention of layer 0 asks attention for chunks of 4 tokens that do not see each other",
    ),
    "sinks-of-other-heads": (
        other_sinks,
        r"GptOssAttention of layer 0 has s_aux \[3\], not one sink for each",
    ),
    "unknown-logits": (unknown_logits, r"changes the output of its head .* \(it names no scale"),
    "other-logits": (
        lambda: unknown_logits(logits_scaling=3.0),
        r"changes the output of its head .* not as its config says \(a scale of 3 with .* or a scale of 0.333333 with",
    ),
    "conv": (
        lambda: model(hf.Lfm2Config(**SIZES, layer_types=["full_attention", "conv"])),
        r"model.layers.1 \(Lfm2DecoderLayer\) never calls the attention interface",
    ),
    "conv-first": (
        lambda: model(hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
        r"model.layers.0 \(Lfm2DecoderLayer\)",
    ),
    "mamba-beside-attention": (
        lambda: model(hf.FalconH1Config(**SIZES, **mamba_sizes())),
        r"model.layers.0 \(FalconH1DecoderLayer\) mixes tokens outside its attention",
    ),
    "shared-keys": (
        gemma3n,
        r"model.layers.2 \(Gemma3nTextDecoderLayer\) and all layers after it reuse the keys and values of earlier",
    ),
    "mamba": (
        lambda: model(hf.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)),
        r"layers.0 \(MambaBlock\) never calls the attention interface",
    ),
    "unknown-delta-net": (
        lambda: model(hf.OlmoHybridConfig(**SIZES, **LINEAR)),
        r"model.layers.0 \(OlmoHybridLinearAttentionDecoderLayer\) never calls the attention interface",
    ),
    "own-delta-net": (
        lambda: qwen3_next(type("Own", (Qwen3NextGatedDeltaNet,), {})),
        r"model.layers.0 \(Qwen3NextDecoderLayer\) never calls the attention interface",
    ),
    "changed-delta-net": (
        lambda: qwen3_next(type("Qwen3NextGatedDeltaNet", (Qwen3NextGatedDeltaNet,), {"forward": doubled})),
        "Qwen3NextGatedDeltaNet of layer 0 does not compute what the gated delta net of transformers",
    ),
    "delta-net-that-fails": (
        lambda: qwen3_next(type("Qwen3NextGatedDeltaNet", (Qwen3NextGatedDeltaNet,), {"forward": None})),
        "Qwen3NextGatedDeltaNet of layer 0 cannot be run by itself",
    ),
    "adapted-convolution": (
        adapted_conv,
        "conv1d of Qwen3NextGatedDeltaNet of layer 0 is Conv1d, of which only the weight would be used",
    ),
    "two-calls": (
        lambda: model(hf.DiffLlamaConfig(**SIZES)),
        r"model.layers.0 \(DiffLlamaDecoderLayer\) calls attention 2 times",
    ),
    "own-mask": (lambda: model(hf.DogeConfig(**SIZES)), "DogeAttention of layer 0 passes its own attention mask"),
    "no-interface": (
        lambda: model(hf.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=4)),
        "BloomModel does not call its attention through transformers' attention interface",
    ),
    "not-causal": (
        lambda: model(hf.BertConfig(**SIZES, is_decoder=False, attention_probs_dropout_prob=0.0)),
        "BertSelfAttention of layer 0 is not causal",
    ),
    "attention-dropout": (lambda: llama(attention_dropout=0.1), "attention_dropout=0.1"),
    "router-loss": (
        lambda: llama(output_router_logits=True),
        "output_router_logits=True: LlamaForCausalLM does not declare which of its modules make router logits",
    ),
    "no-head": (
        lambda: hf.AutoModel.from_config(hf.LlamaConfig(**SIZES)),
        "LlamaModel has no language-modelling head",
    ),
    "no-transformer": (lambda: nn.Linear(2, 2), "longspan prepares transformers models, got Linear"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_prepare_refuses_what_it_would_not_compute_exactly(kind: str) -> None:
    make, told = MODELS[kind]
    made = make()
    attention = getattr(getattr(made, "config", None), "_attn_implementation", None)
    with pytest.raises(ModelError, match=told):
        longspan.prepare(made)
    assert getattr(getattr(made, "config", None), "_attn_implementation", None) == attention
    assert not hasattr(made, "_longspan_applied")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_prepare_refuses_the_same_before_weights_come(kind: str) -> None:
    make, told = MODELS[kind]
    made = make()
    Origin(made, CPU)
    with pytest.raises(ModelError, match=told):
        longspan.prepare(made, device="cpu")
    assert not hasattr(made, "_longspan_applied")
    assert all(parameter.is_meta for parameter in made.parameters())


@pytest.mark.parametrize(
    "name", ["tiny-gemma4", "tiny-gpt-oss", "tiny-qwen3-next", "tiny-qwen3-vl", "tiny-deepseek-v3"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_decided_before_weights_come_is_what_is_decided_with_them(name: str, dtype: torch.dtype) -> None:
    made = random_model(preset_config(name), dtype, CPU)
    weights = {key: value.clone() for key, value in made.state_dict().items()}
    plain = longspan.prepare(made)
    facts = plain.operands, plain.plan, plain.logit_options, plain.parts.norm
    plain.remove()
    origin = Origin(made, CPU)
    blank = longspan.prepare(made, device="cpu")
    assert (blank.operands, blank.plan, blank.logit_options, blank.parts.norm) == facts
    assert all(parameter.is_meta for parameter in made.parameters()) and blank.parts.device == CPU
    origin.bring(made)
    assert all(torch.equal(value, weights[key]) for key, value in made.state_dict().items())
    ids = torch.arange(3, 20)[None]
    assert torch.isfinite(made(**blank.shard({"input_ids": ids, "labels": ids})).loss)


def test_a_device_for_weights_that_are_elsewhere_is_refused() -> None:
    with pytest.raises(ModelError, match="device=meta is to name where the weights .* will be; this one is on cpu"):
        longspan.prepare(llama(), device="meta")


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        made = llama()
    with pytest.raises(ModelError, match=r"meta device.*prepare\(\.\.\., device=\.\.\.\)"):
        longspan.prepare(made)
    with pytest.raises(ModelError, match=r"buffers, such as model.rotary_emb.inv_freq.*longspan.engines.Origin"):
        longspan.prepare(made, device="cpu")


class Mixer(nn.Module):
    """Stands where a token-wise MLP belongs and averages over what came before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class Ahead(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-6 * x.roll(-1, 1)


@pytest.mark.parametrize("module", [Mixer(), Ahead()])
def test_a_layer_that_someone_patched_to_mix_tokens_is_named(module: nn.Module) -> None:
    made = llama()
    made.model.layers[1].mlp = module
    with pytest.raises(ModelError, match=r"model.layers.1 \(LlamaDecoderLayer\) mixes tokens outside its attention"):
        longspan.prepare(made)


def test_keys_that_are_not_a_tokens_own_are_refused() -> None:
    made = llama()
    made.model.layers[0].self_attn.k_proj = nn.Sequential(Mixer(), made.model.layers[0].self_attn.k_proj)
    with pytest.raises(ModelError, match="does not make its attention's k from its own tokens alone"):
        longspan.prepare(made)


def test_a_model_that_counts_positions_by_itself_is_refused() -> None:
    made = llama()
    tables = made.model.rotary_emb.forward
    made.model.rotary_emb.forward = lambda x, position_ids: tables(x, torch.arange(x.shape[1])[None])
    with pytest.raises(ModelError, match="LlamaForCausalLM makes other q in its first layer .* position_ids"):
        longspan.prepare(made)


def test_a_learned_scale_of_scores_is_refused() -> None:
    made = llama()
    made.model.layers[0].self_attn.scaling = nn.Parameter(torch.tensor(0.5))
    with pytest.raises(ModelError, match="LlamaAttention of layer 0 scales its scores by a tensor"):
        longspan.prepare(made)


class Mixed(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).cumsum(1)


def test_a_model_that_mixes_tokens_before_its_layers_is_refused() -> None:
    made = llama()
    made.model.embed_tokens = Mixed(32, 16)
    with pytest.raises(ModelError, match="mixes tokens before its layers"):
        longspan.prepare(made)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"sequence_parallel_size": 2}, TopologyError, "needs 2 processes, but torch.distributed is not initialised"),
        ({"sequence_parallel_size": 0}, TopologyError, "at least 1, got 0"),
        ({"sequence_parallel_size": "2"}, ConfigError, "sequence_parallel_size must be a whole number .*, got '2'"),
        ({"sequence_parallel_size": 2.0}, ConfigError, "sequence_parallel_size must be a whole number .*, got 2.0"),
        ({"sequence_parallel_size": True}, ConfigError, "sequence_parallel_size must be a whole number .*, got True"),
        ({"ring_degree": "1"}, ConfigError, "ring_degree must be a whole number of ranks, or None .*, got '1'"),
        ({"kernel": None}, ConfigError, "kernel must be the name of a kernel, or 'auto' .*, got None"),
        ({"kernel": 3}, ConfigError, "kernel must be the name of a kernel, or 'auto' .*, got 3"),
        ({"mesh": (1, 2)}, ConfigError, r"mesh must be a torch DeviceMesh .*, got \(1, 2\)"),
        ({"ulysses_degree": 2}, TopologyError, "must be sequence_parallel_size, got 2 and None for 1"),
        ({"kernel": "eager"}, KernelError, "mask of all queries by all keys"),
        ({"kernel": "paged|sdpa"}, KernelError, "paged attention"),
        ({"kernel": "flash_attention_2"}, KernelError, "it runs on CUDA devices, not on cpu"),
        ({"kernel": "someone/kernel@main:fn"}, KernelError, "from the Hub"),
        ({"kernel": "nonsense"}, KernelError, "no attention kernel 'nonsense'. Kernels that can serve"),
        ({"memory": "little"}, ConfigError, "memory must be"),
        ({"grad_reduction": "max"}, ConfigError, "'mean' or 'sum', got 'max'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], error: type[Exception], told: str) -> None:
    made = llama()
    with pytest.raises(error, match=told):
        longspan.prepare(made, **options)
    assert not hasattr(made, "_longspan_applied")


@pytest.fixture
def handle() -> Any:
    with redirect_stderr(io.StringIO()):
        return longspan.prepare(llama())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"labels": torch.arange(12)[None]}, "cannot be called with labels: handle.shard makes shift_labels"),
        ({"attention_mask": torch.ones(1, 12)}, "cannot be called with attention_mask: handle.shard reads it"),
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, "cannot be called with cu_seq_lens_q: handle.shard reads it"),
        ({"num_items_in_batch": 7}, r"cannot be called with num_items_in_batch: .* handle.shard\(batch, num_items"),
        ({"output_attentions": True}, "cannot be called with output_attentions"),
        ({"use_cache": True}, "KV cache"),
        ({"past_key_values": hf.DynamicCache()}, "KV cache"),
        ({"cache": hf.DynamicCache()}, "KV cache"),
        ({"return_dict": False}, "leave return_dict out"),
        ({"shift_labels": None}, "no labels, so there is nothing to compute"),
        ({"longspan": None}, r"was given a full batch. Call model\(\*\*handle.shard\(batch\)\)"),
    ],
)
def test_a_prepared_model_refuses_arguments_that_it_would_not_honour(
    handle: Any, fields: dict[str, Any], told: str
) -> None:
    part = handle.shard(batch()) | fields
    with pytest.raises(BatchError, match=told):
        handle.model(**part)
    assert handle.call is None


def test_arguments_that_say_nothing_are_fine(handle: Any) -> None:
    part = handle.shard(batch())
    loss = handle.model(**part).loss
    nothing = {"labels": None, "output_attentions": False, "attention_mask": None, "return_dict": True}
    assert torch.equal(handle.model(**part, **nothing, output_router_logits=None).loss, loss)


def test_a_full_batch_is_refused_however_it_comes(handle: Any) -> None:
    ids = torch.arange(1, 13)[None]
    for call in (lambda: handle.model(ids), lambda: handle.model(input_ids=ids), lambda: handle.model.generate(ids)):
        with pytest.raises(BatchError, match=r"with handle.bypass\(\)"):
            call()


def test_fields_of_the_batch_may_not_smuggle_arguments(handle: Any) -> None:
    for name in ("num_items_in_batch", "output_attentions"):
        with pytest.raises(BatchError, match=name):
            handle.model(**handle.shard(batch(**{name: 3})))


@pytest.mark.parametrize("argument", [{"sliding_window": 4}, {"softcap": 20.0}, {"s_aux": torch.zeros(4)}])
def test_arguments_that_attention_would_heed_are_refused(handle: Any, argument: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"called with {next(iter(argument))}=.* for its attention"):
        handle.model(**handle.shard(batch()), **argument)


@pytest.mark.parametrize("token", [32, 99, -1])
def test_tokens_that_the_model_does_not_know_are_named(handle: Any, token: int) -> None:
    ids = torch.arange(1, 13)[None]
    ids[0, 5] = token
    with pytest.raises(BatchError, match=f"input_ids holds token {token}; the model knows 0 to 31"):
        handle.shard(batch(input_ids=ids))  # before any rank enters a collective


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("label", [32, 999, -1, -101])
def test_labels_that_the_head_does_not_know_are_named(handle: Any, name: str, label: int) -> None:
    labels = torch.arange(1, 13)[None]
    labels[0, 3], labels[0, -1] = -100, label
    with pytest.raises(BatchError, match=f"{name} holds {label}; the model's head has logits 0 to 31, and -100 marks"):
        handle.shard({"input_ids": torch.arange(1, 13)[None], name: labels})  # before any rank enters a collective


@pytest.mark.parametrize("nothing", [None, 3])
def test_a_batch_that_is_none_is_named(handle: Any, nothing: Any) -> None:
    with pytest.raises(BatchError, match=f"A batch is a mapping of field names .*, got {type(nothing).__name__}"):
        handle.shard(nothing)


def test_gathering_logits_that_were_not_asked_for(handle: Any) -> None:
    part = handle.shard(batch())
    with pytest.raises(BatchError, match="prepared with logits=True"):
        handle.gather(handle.model(**part).get("logits"), part)


def test_a_model_prepared_before_the_processes_met_is_refused(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(TopologyError, match="call init_process_group first"):
        handle.model(**handle.shard(batch()))


@pytest.mark.parametrize("items", [12345.0, -5, True, "23", torch.tensor([3, 4]), torch.tensor(2.5)])
def test_targets_are_counted_in_whole_numbers(handle: Any, items: Any) -> None:
    with pytest.raises(BatchError, match="num_items counts targets"):
        handle.shard(batch(), num_items=items)


def test_logits_to_keep_are_refused(handle: Any) -> None:
    with pytest.raises(ModelError, match="The head was given"):
        handle.model(**handle.shard(batch()), logits_to_keep=2)


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing_of_transformers_is_refused(when: str) -> None:
    made = llama()
    if when == "before":
        made.gradient_checkpointing_enable()
        with pytest.raises(ModelError, match=r"gradient_checkpointing_disable\(\)"):
            longspan.prepare(made)
        return
    applied = longspan.prepare(made)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    part = applied.shard(batch())
    with pytest.raises(ModelError, match=r"gradient_checkpointing_disable\(\)"):
        made(**part)
    made.eval()
    made(**part)
    made.train()
    made.gradient_checkpointing_disable()
    made(**part).loss.backward()


def test_settings_changed_behind_our_back_are_noticed() -> None:
    applied = longspan.prepare(llama())
    part = applied.shard(batch())
    layers: Any = applied.layers
    for layer in layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match="attention dropout 0.1"):
        applied.model(**part)
    applied.model.eval()
    applied.model(**part)
    applied.model.config.output_router_logits = True
    with pytest.raises(ModelError, match="output_router_logits=True: LlamaForCausalLM does not declare"):
        applied.model(**part)


def test_another_head_behind_our_back_is_noticed() -> None:
    applied = longspan.prepare(llama())
    applied.model.resize_token_embeddings(40, mean_resizing=False)
    with pytest.raises(ModelError, match="output head that longspan prepared was not called"):
        applied.model(**applied.shard(batch()))


def test_another_attention_behind_our_back_is_noticed(handle: Any) -> None:
    handle.model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="attention implementation was set to 'sdpa' after longspan.prepare"):
        handle.model(**handle.shard(batch()))


def test_models_made_from_one_config_object_do_not_share_their_attention() -> None:
    config = hf.LlamaConfig(**SIZES)
    plain, other = model(config), model(config)
    assert plain.config is other.config
    ids = batch()["input_ids"]
    logits = plain(input_ids=ids).logits
    applied = longspan.prepare(other)
    assert torch.equal(plain(input_ids=ids).logits, logits)
    second = longspan.prepare(plain)
    with applied.bypass():
        second.model(**second.shard(batch()))
    applied.remove()
    second.model(**second.shard(batch()))


def test_a_layer_called_by_itself_says_what_is_missing(handle: Any) -> None:
    x = torch.rand(1, 4, 16)
    tables = handle.model.model.rotary_emb(x, torch.arange(4)[None])
    with pytest.raises(ModelError, match="without the context of a sharded batch"):
        handle.layers[0](x, position_embeddings=tables)


def test_after_an_error_the_model_still_works(handle: Any) -> None:
    part = handle.shard(batch())
    loss = handle.model(**part).loss
    with pytest.raises(BatchError):
        handle.model(**part, output_attentions=True)
    with pytest.raises(BatchError):
        handle.model(**handle.shard(batch(input_ids=torch.full((1, 12), 99))))
    assert torch.equal(handle.model(**part).loss, loss)
