"""Models whose MLPs run in tiles against the same models as they are, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

import longspan
from longspan.errors import ConfigError, ModelError
from longspan.mlp import TiledForward

IDS = torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(1))


def build(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "llama": lambda: LlamaConfig(**sizes, hidden_size=16, intermediate_size=24, mlp_bias=True),
        "gpt2": lambda: GPT2Config(**sizes, n_embd=16, n_inner=24, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "moe": lambda: Qwen3MoeConfig(**sizes, hidden_size=16, num_experts=4, moe_intermediate_size=8),
    }[kind]()
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()


def step(model: PreTrainedModel) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters() if p.grad is not None]


def alike(found: tuple[float, list[Tensor]], wanted: tuple[float, list[Tensor]]) -> bool:
    assert len(found[1]) == len(wanted[1])
    assert all(g.abs().sum() > 0 for g in wanted[1])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found[1], wanted[1], strict=True)]
    return max(*errors, abs(found[0] - wanted[0])) < 1e-10


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("size", [{"tiles": 1}, {"tiles": 4}, {"tiles": 100}, {"tile_tokens": 5}, {}])
def test_gradients_are_those_of_the_model(kind, size):
    model = build(kind)
    wanted = step(model)
    code, seen = type(model.base_model), []
    handle = longspan.tiled_mlp(model, **size)
    assert len(handle.names) == 2
    assert all(name.endswith(".mlp") for name in handle.names)
    mlp = model.get_submodule(handle.names[0])
    mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    inner = next(m for n, m in mlp.named_modules() if n in ("up_proj", "c_fc"))
    inner.register_forward_hook(lambda module, args, out: seen.append(out.shape[:-1].numel()))
    assert alike(step(model), wanted)
    tile = {1: 19, 4: 5, 100: 1}[size["tiles"]] if "tiles" in size else size.get("tile_tokens", 19)
    assert max(n for n in seen[2:] if isinstance(n, int)) <= 2 * max(tile, 4), "a probe of 4 tokens, then tiles"
    assert (2, 19, 16) in seen, "hooks on the module itself see all tokens"
    assert type(model.base_model) is code


def test_other_models_and_classes_are_untouched_and_removal_is_complete():
    model, other = build(), build()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    with longspan.tiled_mlp(model, tiles=2):
        assert isinstance(model.model.layers[0].mlp.forward, TiledForward)
        assert "forward" not in other.model.layers[0].mlp.__dict__
        with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp \(LlamaMLP\) runs in tiles already"):
            longspan.tiled_mlp(model, tiles=2)
    assert {n: dict(m.__dict__) for n, m in model.named_modules()} == before
    with pytest.raises(KeyError), longspan.tiled_mlp(model, tiles=2):
        raise KeyError
    assert {n: dict(m.__dict__) for n, m in model.named_modules()} == before
    mlp = model.model.layers[0].mlp
    mine = mlp.forward = lambda x: x * 2
    handle = longspan.tiled_mlp(mlp, tiles=2)
    assert handle.names == ("",)
    assert torch.equal(mlp(torch.ones(1, 4, 16)), 2 * torch.ones(1, 4, 16))
    handle.remove()
    assert mlp.forward is mine
    longspan.tiled_mlp(mlp, tiles=2)
    handle.remove()
    assert isinstance(mlp.forward, TiledForward)


def test_a_copy_trains_itself():
    model = build()
    longspan.tiled_mlp(model, tiles=3)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.down_proj.weight.zero_()
        twin.model.layers[0].mlp.down_proj.bias.zero_()
    x = torch.ones(1, 4, 16, dtype=torch.float64)
    assert twin.model.layers[0].mlp(x).abs().sum() == 0
    step(twin)
    assert all(p.grad is None for p in model.parameters())


def test_checkpointed_layers_run_their_mlp_twice_and_not_three_times():
    model = build()
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    runs: list[int] = []
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda module, args, out: runs.append(out.shape[1]))
    longspan.tiled_mlp(model, tile_tokens=10)
    step(model)
    runs.clear()
    assert alike(step(model), wanted)
    assert runs == [10, 9] * 2


def test_the_probe_disturbs_nothing():
    torch.manual_seed(3)
    mlp = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    mlp[0].eval()
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    torch.manual_seed(5)
    wanted = mlp(x)
    longspan.tiled_mlp(mlp, tiles=1)
    torch.manual_seed(5)
    assert torch.equal(mlp(x), wanted)
    assert mlp[1].training
    longspan.tiled_mlp(drawing := Drawing(), tiles=1)
    torch.manual_seed(5)
    drawing(x)
    found = torch.rand(1)
    torch.manual_seed(5)
    torch.rand(1, dtype=x.dtype)
    assert torch.equal(torch.rand(1), found)
    assert not mlp[0].training


class Shifted(nn.Module):
    """Mixes each token with the one before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.roll(x, 1, 1)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, *, hidden_states: Tensor) -> Tensor:
        return self.linear(hidden_states)


class Drawing(nn.Module):
    """Draws a number and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand(1, dtype=x.dtype)


def tiled(module: nn.Module) -> nn.Module:
    longspan.tiled_mlp(module, tiles=2)
    return module


def test_modules_that_cannot_run_in_tiles_are_refused():
    x = torch.randn(1, 6, 4)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp \(Qwen3MoeSparseMoeBlock\) holds experts"):
        longspan.tiled_mlp(build("moe"))
    with pytest.raises(ModelError, match="mixes tokens"):
        tiled(Shifted())(x)
    with pytest.raises(ModelError, match="returns something else"):
        tiled(Pair())(x)
    with pytest.raises(ModelError, match="with 2 arguments"):
        tiled(nn.Linear(4, 4))(x, x)
    with pytest.raises(ConfigError, match="tiles must be an integer of at least 1"):
        longspan.tiled_mlp(nn.Linear(4, 4), tiles=0)
    headless = build()
    headless.model.layers = nn.ModuleList()
    with pytest.raises(ModelError, match="LlamaForCausalLM has no submodule named mlp"):
        longspan.tiled_mlp(headless)


def test_arguments_by_keyword_and_flat_tokens():
    module, x = Keyword(), torch.randn(2, 6, 4, requires_grad=True)
    wanted = torch.autograd.grad(module(hidden_states=x).sum(), [x, *module.parameters()])
    longspan.tiled_mlp(module, tiles=4)
    found = torch.autograd.grad(module(hidden_states=x).sum(), [x, *module.parameters()])
    torch.testing.assert_close(found, wanted)
    flat = module(hidden_states=x.flatten(0, 1))
    torch.testing.assert_close(flat, module.linear(x.flatten(0, 1)))
