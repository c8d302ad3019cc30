"""Tiled losses and log-probabilities against plain cross-entropy of full logits, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from longspan import tiling
from longspan.errors import BatchError, ConfigError, ModelError
from longspan.loss import Head, LossOptions, greedy_scores, tiled_loss, token_logps

B, S, D, V = 2, 13, 6, 17
IGNORED = -100
TILES = [1, 5, 26, 1000, None]
OPTIONS = {
    "plain": LossOptions(),
    "scale": LossOptions(logit_scale=0.3),
    "softcap": LossOptions(softcap=1.5),
    "smoothing": LossOptions(label_smoothing=0.2),
    "z": LossOptions(z_loss=0.1),
    "index": LossOptions(ignore_index=3),
    "all": LossOptions(ignore_index=3, logit_scale=2.0, softcap=2.5, label_smoothing=0.1, z_loss=0.05),
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill `torch.empty` with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Adapter(nn.Module):
    """A frozen linear layer plus a trained low-rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, V).requires_grad_(False)
        self.down = nn.Linear(D, 2, bias=False)
        self.up = nn.Linear(2, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Added(nn.Module):
    """A weight that is the sum of two parameters: autograd returns one tensor as the gradient of both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(V, D))
        self.right = nn.Parameter(torch.randn(V, D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.left + self.right).T


HEADS = {
    "bias": lambda: nn.Linear(D, V),
    "no_bias": lambda: nn.Linear(D, V, bias=False),
    "frozen": lambda: nn.Linear(D, V).requires_grad_(False),
    "adapter": Adapter,
    "added": Added,
}


def make(head="bias", frozen_trunk=False):
    """Return hidden [B, S, D] (not contiguous), labels [B, S] with ignored ones, a head, and the leaves to compare."""
    module = HEADS[head]().double()
    base = torch.randn(S, B, D, dtype=torch.float64, requires_grad=not frozen_trunk)
    labels = torch.randint(0, V, (B, S))
    labels[0, 2:6] = IGNORED
    labels[1, -1] = 3
    leaves = [t for t in (base, *module.parameters()) if t.requires_grad]
    return base.transpose(0, 1), labels, module, leaves


def plain_loss(hidden, module, labels, reduction="sum", options=OPTIONS["plain"]):
    """Compute the loss from full logits, in their own dtype."""
    logits = module(hidden).flatten(0, 1) * options.logit_scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    labels = labels.flatten()
    loss = F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=options.label_smoothing, ignore_index=options.ignore_index
    )
    valid = labels != options.ignore_index
    loss = loss + options.z_loss * torch.logsumexp(logits, -1) ** 2 * valid
    return {"sum": loss.sum(), "mean": loss.sum() / valid.sum(), "none": loss.view(B, -1)}[reduction]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error by norm; infinite unless both are finite and the expected one is not zero."""
    ratio = (found - expected).norm() / expected.norm()
    return ratio.item() if ratio.isfinite() and expected.norm() > 0 else float("inf")


def check(ours: Tensor, plain: Tensor, leaves: list[Tensor], weight: Tensor) -> None:
    """Compare values and, under the incoming gradient `weight`, every gradient."""
    assert ours.shape == plain.shape
    assert ours.dtype == plain.dtype
    assert error(ours.detach(), plain.detach()) < 1e-12
    expected = torch.autograd.grad(plain, leaves, weight, retain_graph=True)
    for found, truth in zip(torch.autograd.grad(ours, leaves, weight, retain_graph=True), expected, strict=True):
        assert found.shape == truth.shape
        assert found.dtype == truth.dtype
        assert error(found, truth) < 1e-12


def incoming(reduction: str) -> Tensor:
    return torch.randn(B, S, dtype=torch.float64) if reduction == "none" else torch.tensor(0.37, dtype=torch.float64)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, reduction, tile):
    hidden, labels, module, leaves = make()
    options = OPTIONS[options]
    labels = labels.where(labels != IGNORED, options.ignore_index)
    ours = tiled_loss(hidden, module, labels, tile_tokens=tile, reduction=reduction, options=options)
    check(ours, plain_loss(hidden, module, labels, reduction, options), leaves, incoming(reduction))


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("frozen_trunk", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_heads(head, frozen_trunk, reduction):
    hidden, labels, module, leaves = make(head, frozen_trunk)
    ours = tiled_loss(hidden, module, labels, tile_tokens=4, reduction=reduction)
    if not leaves:
        assert not ours.requires_grad
        assert error(ours, plain_loss(hidden, module, labels, reduction)) < 1e-12
        return
    check(ours, plain_loss(hidden, module, labels, reduction), leaves, incoming(reduction))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tied_weight_and_weight_tensors(reduction):
    embedding = nn.Embedding(V, D).double()
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    tokens, labels = torch.randint(0, V, (2, B, S))
    hidden = embedding(tokens).sin()
    plain = plain_loss(hidden, lambda x: F.linear(x, embedding.weight, bias), labels, reduction)
    ours = tiled_loss(hidden, Head.of(embedding.weight, bias), labels, tile_tokens=7, reduction=reduction)
    check(ours, plain, [embedding.weight, bias], incoming(reduction))
    weight = embedding.weight * 2  # not a leaf
    plain = plain_loss(hidden, lambda x: F.linear(x, weight), labels, reduction)
    ours = tiled_loss(hidden, weight, labels, tile_tokens=7, reduction=reduction)
    check(ours, plain, [embedding.weight], incoming(reduction))


def test_head_of_a_tensor_follows_its_updates():
    hidden, labels, module, _ = make("no_bias")
    weight = module.weight
    head, optimizer = Head.of(weight), torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        check(tiled_loss(hidden, head, labels), plain_loss(hidden, module, labels), [weight], incoming("sum"))
        optimizer.zero_grad()
        tiled_loss(hidden, head, labels).backward()
        optimizer.step()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("options", ["plain", "scale", "softcap"])
@pytest.mark.parametrize("entropy", [False, True])
def test_token_logps(entropy, options, tile):
    hidden, labels, module, leaves = make("adapter")
    options = OPTIONS[options]
    logits = module(hidden) * options.logit_scale
    logits = logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)
    plain = -plain_loss(hidden, module, labels, "none", options)
    ours = token_logps(hidden, module, labels, tile_tokens=tile, entropy=entropy, options=options)
    if entropy:
        plain_entropy = torch.distributions.Categorical(logits=logits).entropy() * (labels != IGNORED)
        check(ours[1], plain_entropy, leaves, incoming("none"))
        ours = token_logps(hidden, module, labels, tile_tokens=tile, entropy=True, options=options)
        ours, plain = torch.cat(ours), torch.cat([plain, plain_entropy])
        check(ours, plain, leaves, torch.randn(2 * B, S, dtype=torch.float64))
    else:
        check(ours, plain, leaves, incoming("none"))


def test_entropy_with_impossible_tokens():
    hidden, labels, module, leaves = make()
    allowed = torch.arange(V) < 9
    head = Head(lambda x: module(x).masked_fill(~allowed, -torch.inf), tuple(module.parameters()))
    _, ours = token_logps(hidden, head, labels.clamp(max=8), tile_tokens=4, entropy=True)
    plain = torch.distributions.Categorical(logits=module(hidden)[..., :9]).entropy() * (labels != IGNORED)
    check(ours, plain, leaves, incoming("none"))


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("tokens", [0, S])
def test_no_targets_mean_zero_and_zero_gradients(reduction, tokens):
    hidden, labels, module, leaves = make()
    ours = tiled_loss(hidden[:, :tokens], module, labels[:, :tokens].fill_(IGNORED), tile_tokens=4, reduction=reduction)
    gradients = torch.autograd.grad(ours.sum(), leaves)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in (ours, *gradients))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape(data):
    rows, length, vocabulary = (data.draw(st.integers(1, top)) for top in (3, 9, 12))
    tile = data.draw(st.none() | st.integers(1, 30))
    reduction = data.draw(st.sampled_from(["sum", "none"]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    hidden = torch.randn(rows, length, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows, length)).masked_fill(torch.rand(rows, length) < 0.3, IGNORED)
    ours = tiled_loss(hidden, weight, labels, tile_tokens=tile, reduction=reduction)
    plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none").view(rows, length)
    plain = plain if reduction == "none" else plain.sum()
    d = torch.randn_like(plain)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    found, truth = (torch.autograd.grad(loss, (hidden, weight), d) for loss in (ours, plain))
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def weight_error(tiles: int) -> float:
    """Relative error of a bf16 weight gradient against float64, for 2048 tokens in so many tiles."""
    torch.manual_seed(0)
    hidden = torch.randn(1, 2048, 16).bfloat16()
    weight = torch.randn(32, 16).bfloat16().requires_grad_()
    labels = torch.randint(0, 32, (1, 2048))
    (found,) = torch.autograd.grad(tiled_loss(hidden, weight, labels, tile_tokens=2048 // tiles), weight)
    wide = weight.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy((hidden[0].double() @ wide.T), labels[0], reduction="sum"), wide)
    return error(found.double(), truth)


def test_weight_error_does_not_grow_with_the_number_of_tiles(monkeypatch):
    one = weight_error(1)
    assert one < 5e-3
    assert weight_error(16) < 1.1 * one
    assert weight_error(128) < 1.1 * one
    monkeypatch.setattr(tiling, "wide_dtype", lambda dtype: dtype)
    assert weight_error(128) > 1.5 * one, "the bound must notice sums in bf16"


def ignores_incoming(monkeypatch):
    """Scale only the gradient of hidden, which is the one without V rows."""
    scaled = tiling.scaled
    monkeypatch.setattr(tiling, "scaled", lambda t, s, dtype: t.to(dtype) if t.shape[0] == V else scaled(t, s, dtype))


def loses_a_gradient(monkeypatch):
    add = tiling.GradientSum.add
    monkeypatch.setattr(tiling.GradientSum, "add", lambda self, gs: add(self, [*gs[:-1], torch.zeros_like(gs[-1])]))


def keeps_the_last_tile(monkeypatch):
    monkeypatch.setattr(tiling.GradientSum, "add", lambda self, gs: setattr(self, "_totals", list(gs)))


def shares_memory(monkeypatch):
    def add(self, gradients):
        self._totals = [g if s is None else s.add_(g) for s, g in zip(self._totals, gradients, strict=True)]

    monkeypatch.setattr(tiling.GradientSum, "add", add)


@pytest.mark.parametrize("mutate", [ignores_incoming, loses_a_gradient, keeps_the_last_tile, shares_memory])
def test_wrong_gradients_are_noticed(mutate, monkeypatch):
    hidden, labels, module, leaves = make("added")
    plain = plain_loss(hidden, module, labels)
    check(tiled_loss(hidden, module, labels, tile_tokens=4), plain, leaves, incoming("sum"))
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(tiled_loss(hidden, module, labels, tile_tokens=4), plain, leaves, incoming("sum"))


@pytest.mark.parametrize(
    ("make_options", "text"),
    [
        (lambda: LossOptions(label_smoothing=-0.1), "label_smoothing must lie in 0 to 1, got -0.1"),
        (lambda: LossOptions(label_smoothing=float("nan")), "label_smoothing"),
        (lambda: LossOptions(z_loss=-1.0), "z_loss must be 0 or a positive number, got -1.0"),
        (lambda: LossOptions(softcap=0.0), "softcap must be a positive number"),
        (lambda: LossOptions(logit_scale=0.0), "logit_scale must be a positive number"),
    ],
)
def test_options_that_mean_nothing(make_options, text):
    with pytest.raises(ConfigError, match=text):
        make_options()


def test_wrong_input():
    hidden, labels, module, _ = make()
    with pytest.raises(BatchError, match=r"got \(2, 13, 6\) and \(2, 12\)"):
        tiled_loss(hidden, module, labels[:, 1:])
    with pytest.raises(BatchError, match=r"Label 17 is outside the head's 17 logits; labels must be 0 to 16, or -100"):
        tiled_loss(hidden, module, labels.clone().fill_(V))
    with pytest.raises(BatchError, match=r"Label -1 is outside"):
        token_logps(hidden, module, labels.clone().fill_(-1))
    with pytest.raises(BatchError, match=r"integers, got torch.float64 and torch.float32"):
        tiled_loss(hidden, module, labels.float())
    with pytest.raises(BatchError, match=r"hidden is on cpu and shift_labels are on meta"):
        tiled_loss(hidden, module, labels.to("meta"))
    with pytest.raises(ConfigError, match=r"reduction must be 'sum', 'mean' or 'none', got 'avg'"):
        tiled_loss(hidden, module, labels, reduction="avg")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"tile_tokens must be at least 1, or None to choose, got 0"):
        tiled_loss(hidden, module, labels, tile_tokens=0)
    with pytest.raises(ConfigError, match=r"token_logps knows no label_smoothing \(got 0.1\)"):
        token_logps(hidden, module, labels, options=LossOptions(label_smoothing=0.1))


def test_wrong_heads():
    hidden, labels, module, _ = make()
    with pytest.raises(ModelError, match="a module brings its own"):
        Head.of(module, torch.zeros(V))
    with pytest.raises(ModelError, match=r"weight must be \[V, d\] and its bias \[V\], got \(17, 6\) and \(6,\)"):
        Head.of(module.weight, torch.zeros(D))
    with pytest.raises(ModelError, match=r"\[1, 5, V\], got shape \(1, 4, 17\)"):
        tiled_loss(hidden, Head(lambda x: module(x[:, 1:]), ()), labels, tile_tokens=5)
    with pytest.raises(ModelError, match=r"\[1, 5, V\], got tuple"):
        tiled_loss(hidden, Head(lambda x: (module(x),), ()), labels, tile_tokens=5)  # pyright: ignore[reportArgumentType]
    module.weight.data = torch.empty(0)
    with pytest.raises(ModelError, match=r"The head's weight is sharded at this moment \(shape \(0,\)"):
        tiled_loss(hidden, module, labels)


def test_sharded_tensors_are_refused():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.randn(V, D), init_device_mesh("cpu", (1,)))
        with pytest.raises(ModelError, match=r"weight is sharded at this moment \(shape \(17, 6\), DTensor\)"):
            Head.of(weight)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("options", ["plain", "softcap", "index"])
def test_greedy_scores_are_those_of_whole_logits(options):
    hidden, labels, head, _ = make()
    ignored = OPTIONS[options].ignore_index
    with torch.no_grad():
        logits = OPTIONS[options].transform(head(hidden))
        best = logits.argmax(-1)
        labels[labels < 0] = ignored
        labels[0, ::2] = best[0, ::2]
        labels[:, 4:9] = ignored
        wanted = labels != ignored
        logps = logits.log_softmax(-1).gather(-1, labels.masked_fill(~wanted, 0)[..., None])[..., 0]
    found, hits = greedy_scores(hidden, head, labels, OPTIONS[options])
    assert not found.requires_grad and found.shape == hits.shape == labels.shape
    assert torch.allclose(found, logps.where(wanted, 0.0), rtol=1e-12, atol=0)
    assert torch.equal(hits, ((best == labels) & wanted).double())
    assert 0 < hits.sum() < wanted.sum()
    seen: list[int] = []
    counted = Head(lambda tile: seen.append(tile.shape[1]) or head(tile), ())
    greedy_scores(hidden, counted, labels, OPTIONS[options])
    assert sum(seen) == int(wanted.sum()), "tokens without a target get no logits"
    assert not greedy_scores(hidden, head, torch.full_like(labels, ignored), OPTIONS[options])[0].any()
