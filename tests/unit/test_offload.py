"""Checkpoint inputs in host memory: the same gradients bit for bit, few inputs on the device, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan import host, offload
from longspan.errors import ConfigError, ModelError, TrainingError

LAYERS, D = 7, 8
SETTINGS = [{}, {"keep_last_count": 0, "max_fwd_stash_count": 0}, {"keep_last_count": 3}, {"max_fwd_stash_count": 5},
            {"use_streams": False}, {"use_pin_memory": False}, {"max_cpu_buffer_pool_count": 0}]  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill `torch.empty` with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Stack(nn.Module):
    """Layers in checkpoints; remembers the storages of their inputs, and how many were alive while each ran."""

    def __init__(self, reentrant: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(layers)).double()
        self.reentrant = reentrant
        self.storages: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for layer in self.layers:
            self.storages.append(StorageWeakRef(x.untyped_storage()))
            x = checkpoint(self.run, layer, x, use_reentrant=self.reentrant)
        return x.exp().sum()

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        self.alive.append(sum(not storage.expired() for storage in self.storages))
        return layer(x).tanh().sin()


def tokens(count: int = 5) -> Tensor:
    return torch.randn(1, count, D, dtype=torch.float64, requires_grad=True)


def gradients(model: nn.Module, loss: Tensor, *more: Tensor) -> list[Tensor]:
    leaves = [*model.parameters(), *more]
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)
    return [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]


@contextlib.contextmanager
def saves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """List the elements of every tensor that is copied to the host."""
    seen: list[int] = []
    real = host.Buffer.save
    with monkeypatch.context() as patch:
        patch.setattr(host.Buffer, "save", lambda self, source: seen.append(source.numel()) or real(self, source))
        yield seen


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradients_are_equal_over_steps_of_unlike_lengths(settings, reentrant, monkeypatch):
    monkeypatch.setattr(host, "_CHUNK_BYTES", 256)
    model, context = Stack(reentrant), longspan.offload_checkpoints(min_offload_bytes=1, **settings)
    for count in (5, 40, 1, 17, 40):
        x = tokens(count)
        wanted = gradients(model, model(x), x)
        with saves(monkeypatch) as seen, context:
            found = gradients(model, model(x), x)
        assert all(map(torch.equal, found, wanted))
        assert seen == [count * D] * (LAYERS - settings.get("keep_last_count", 1))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_few_inputs_are_on_the_device(settings, reentrant, monkeypatch):
    model, x = Stack(reentrant), tokens()
    real = host.Layout.empty

    def empty(self: host.Layout) -> Tensor:
        tensor = real(self)
        model.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(host.Layout, "empty", empty)
    gradients(model, model(x))
    assert model.alive[LAYERS - 1] == LAYERS, "without offloading they all are"
    model.storages.clear()
    model.alive.clear()
    with longspan.offload_checkpoints(min_offload_bytes=1, **settings):
        gradients(model, model(x))
    stash = settings.get("max_fwd_stash_count", 2) if settings.get("use_streams", True) else 0
    assert len(model.alive) == 2 * LAYERS
    assert max(model.alive) <= 1 + stash + settings.get("keep_last_count", 1)
    assert max(model.alive[LAYERS + 3 :]) >= min(1 + stash, 2), "backward fetches ahead"
    assert all(storage.expired() for storage in model.storages)


def test_buffers_are_reused_and_grow(monkeypatch):
    monkeypatch.setattr(host, "_CHUNK_BYTES", 512)
    model, context = Stack(), longspan.offload_checkpoints(min_offload_bytes=1)
    made: list[int] = []
    real = context.pool.allocate
    context.pool.allocate = lambda n, pinned: made.append(n) or real(n, pinned)
    for count, chunks in ((5, [512] * 6), (3, []), (5, []), (17, [512, 64] * 6), (40, [512, 512, 512] * 6), (40, [])):
        made.clear()
        with context:
            gradients(model, model(tokens(count)))
        if count != 40:
            assert sorted(made) == sorted(chunks)
        assert len(context.pool.idle) == LAYERS - 1
    assert not made
    small = longspan.offload_checkpoints(min_offload_bytes=1, max_cpu_buffer_pool_count=2)
    with small:
        gradients(model, model(tokens()))
    assert len(small.pool.idle) == 2


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * dy * ctx.saved_tensors[0]


def test_other_saved_tensors_stay_where_they_are(monkeypatch):
    x = tokens(20)
    with saves(monkeypatch) as seen, longspan.offload_checkpoints(min_offload_bytes=0):
        y = (x * 2).exp()
        assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # type: ignore[union-attr]
        z = checkpoint(torch.sin, _Square.apply(y).sqrt(), use_reentrant=False)
        (found,) = torch.autograd.grad(z.square().sum(), x)
    torch.testing.assert_close(found, 2 * y.sin() * y.cos() * y * 2)
    assert seen == [], "the newest input stays too"


def test_small_integer_parameter_and_expanded_inputs_stay(monkeypatch):
    weight, x, index = nn.Parameter(torch.randn(40)), torch.randn(40, requires_grad=True), torch.arange(40)

    def fn(x: Tensor, weight: Tensor, index: Tensor, one: Tensor, flat: Tensor) -> Tensor:
        return (x * weight * one * flat)[index].sin().sum()

    arguments = [x * 1, weight, index, torch.ones(1), torch.ones(1).expand(40)]
    with saves(monkeypatch) as seen, longspan.offload_checkpoints(min_offload_bytes=160, keep_last_count=0):
        loss = checkpoint(fn, *arguments, use_reentrant=False)
        found = torch.autograd.grad(loss, [x, weight])
    assert seen == [40]
    wanted = torch.autograd.grad(fn(x * 1, *arguments[1:]), [x, weight])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    with saves(monkeypatch) as seen, longspan.offload_checkpoints(min_offload_bytes=161, keep_last_count=0):
        checkpoint(fn, *arguments, use_reentrant=False)
    assert seen == []


@pytest.mark.parametrize("shape", ["transposed", "gaps", "offset", "both"])
def test_strides_come_back(shape, monkeypatch):
    monkeypatch.setattr(host, "_CHUNK_BYTES", 128)
    base = torch.randn(6, 4, 5, requires_grad=True)
    copy = base * 1
    x = {"transposed": copy.transpose(0, 2), "gaps": copy[:, 1:3], "offset": copy[2:]}.get(
        shape, copy.transpose(0, 2)[:, 1:3]
    )
    strides = []

    def fn(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return (
            x.transpose(0, 2).reshape(-1).sin() if shape in ("gaps", "offset") else x.permute(2, 1, 0).flatten().sin()
        )

    (wanted,) = torch.autograd.grad(fn(x).square().sum(), base, retain_graph=True)
    with longspan.offload_checkpoints(min_offload_bytes=0, keep_last_count=0, max_fwd_stash_count=0):
        (found,) = torch.autograd.grad(checkpoint(fn, x, use_reentrant=False).square().sum(), base)
    assert torch.equal(found, wanted)
    assert strides[1] == x.stride()
    assert strides[2] == torch.empty_like(x).stride()


class Boom(Exception):
    pass


def fail(x: Tensor) -> Tensor:
    raise Boom


def test_hooks_are_gone_after_the_context_and_after_an_exception(monkeypatch):
    model, context = Stack(), longspan.offload_checkpoints(min_offload_bytes=1)
    wanted = gradients(model, model(x := tokens()))
    with pytest.raises(Boom), context:
        gradients(model, model(x) * fail(x))
    gc.collect()  # the exception holds the frames
    assert all(storage.expired() for storage in model.storages)
    assert len(context.pool.idle) == LAYERS - 1
    with saves(monkeypatch) as seen:
        assert all(map(torch.equal, gradients(model, model(x)), wanted))
        assert not seen
        with context:
            loss = model(x)
        assert len(seen) == LAYERS - 1
        assert all(map(torch.equal, gradients(model, loss), wanted)), "backward may also come later"
    handle = weakref.ref(context)
    del context, loss
    gc.collect()
    assert handle() is None


def test_nothing_is_left_without_backward():
    model, context = Stack(), longspan.offload_checkpoints(min_offload_bytes=1)
    with context:
        model(tokens())
        gc.collect()
        assert sum(not storage.expired() for storage in model.storages) == 2, "those whose copies may be under way"
        assert len(context.pool.idle) == LAYERS - 1
    assert all(storage.expired() for storage in model.storages)
    assert len(context.pool.idle) == LAYERS - 1


def test_contexts_nest_and_models_mix(monkeypatch):
    teacher, student = Stack(layers=3), Stack(layers=5)
    outer, inner = (longspan.offload_checkpoints(min_offload_bytes=1) for _ in range(2))
    x = tokens()
    wanted = gradients(nn.ModuleList([teacher, student]), teacher(x) * student(x))
    with outer:
        first = teacher(x)
        with inner:
            second = student(x)
        again = teacher(x)
        with pytest.raises(TrainingError, match="entered already"), outer:
            pass
        found = gradients(nn.ModuleList([teacher, student]), first * second)
        del first, again
        gc.collect()
    assert all(map(torch.equal, found, wanted))
    assert (len(outer.pool.idle), len(inner.pool.idle)) == (5, 4)


def test_micro_batches_in_one_context():
    model, (a, b) = Stack(), (tokens(4), tokens(9))
    wanted = gradients(model, model(a) + model(b))
    with longspan.offload_checkpoints(min_offload_bytes=1) as context:
        first, second = model(a), model(b)
        model.zero_grad()
        first.backward()
        second.backward()
    assert all(torch.allclose(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))  # type: ignore[arg-type]
    assert len(context.pool.idle) == 2 * LAYERS - 1


def test_backward_twice():
    model, x = Stack(), tokens()
    wanted = gradients(model, model(x), x)
    with longspan.offload_checkpoints(min_offload_bytes=1):
        loss = model(x)
        first = torch.autograd.grad(loss, [*model.parameters(), x], retain_graph=True)
        second = torch.autograd.grad(loss, [*model.parameters(), x])
    assert all(map(torch.equal, first, wanted))
    assert all(map(torch.equal, second, wanted))


def modified_at(layer: int, settings: dict[str, Any], after: int = 6) -> Tensor:
    """Return the gradient of x through checkpoints of sin, when the input of one is written to after some layers."""
    leaf = torch.linspace(0.1, 1, 30, requires_grad=True)
    inputs = [leaf * 1]
    with longspan.offload_checkpoints(min_offload_bytes=0, **settings):
        for i in range(7):
            if i == after:
                inputs[layer].detach().mul_(2)
            if i < 6:
                inputs.append(checkpoint(torch.sin, inputs[-1], use_reentrant=False))
        inputs[-1].sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("settings", [{}, {"keep_last_count": 0, "max_fwd_stash_count": 0}], ids=str)
def test_inputs_that_are_written_to_are_noticed_while_it_matters(settings):
    wanted = torch.autograd.grad(_sines(leaf := torch.linspace(0.1, 1, 30, requires_grad=True)).sum(), leaf)[0]
    assert torch.equal(modified_at(1, settings), wanted), "its copy was finished"
    for layer in (3, 4, 5) if not settings else ():  # on their way, and not yet
        with pytest.raises(TrainingError, match=r"shape \[30\].*modified by an inplace operation"):
            modified_at(layer, settings)
    if not settings:
        with pytest.raises(TrainingError, match="modified by an inplace operation"):
            modified_at(1, settings, after=3)  # let go later, before backward


def _sines(x: Tensor) -> Tensor:
    for _ in range(6):
        x = x.sin()
    return x


def test_other_tensors_that_are_written_to_are_noticed_as_ever():
    x = tokens()
    with longspan.offload_checkpoints():
        checkpoint(torch.sin, x, use_reentrant=False)
        y = x.exp()
        z = y.sum()
        y.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


def test_a_transformers_model(monkeypatch):
    config = LlamaConfig(vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                         num_attention_heads=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    context = longspan.offload_checkpoints()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for length in (24, 33, 18):
            ids = torch.randint(37, (2, length))
            wanted = gradients(model, model(input_ids=ids, labels=ids).loss)
            with saves(monkeypatch) as seen, context:
                found = gradients(model, model(input_ids=ids, labels=ids).loss)
            assert all(map(torch.equal, found, wanted))
            assert seen == [2 * length * 16] * 3
    assert len(context.pool.idle) == 3


def test_what_is_not_offloaded_is_told():
    x = tokens(40)
    with pytest.warns(UserWarning, match="by position, not by keyword"), longspan.offload_checkpoints():
        checkpoint(lambda *, x: x.sin(), x=x * 1, use_reentrant=False).exp().sum().backward()
    with warnings.catch_warnings(action="error"), longspan.offload_checkpoints(), torch.no_grad():
        checkpoint(torch.sin, x, use_reentrant=False)

    class Odd(Tensor):
        pass

    odd = torch.randn(400).as_subclass(Odd)
    with pytest.raises(ModelError, match="was given a Odd"), longspan.offload_checkpoints():
        checkpoint(torch.mul, odd, torch.ones(400, requires_grad=True), use_reentrant=False)


COUNTS = ["min_offload_bytes", "max_fwd_stash_count", "max_cpu_buffer_pool_count", "keep_last_count"]


@pytest.mark.parametrize("name", COUNTS)
def test_negative_numbers_are_refused(name):
    for value in (-1, 1.5, True):
        with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 0, got {value}"):
            longspan.offload_checkpoints(**{name: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["use_pin_memory", "use_streams"])
def test_what_is_neither_true_nor_false_is_refused(name):
    for value in ("x", "False", 1, None):
        with pytest.raises(ConfigError, match=f"{name} must be True or False, got {value!r}"):
            longspan.offload_checkpoints(**{name: value})  # pyright: ignore[reportArgumentType]


def test_a_torch_that_saves_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(offload, "_GENERATOR", None)
    with pytest.raises(TrainingError, match="saves the inputs of checkpointed regions in a way"):
        longspan.offload_checkpoints().__enter__()


class _Save(torch.autograd.Function):
    """How earlier versions of torch save the inputs."""

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)))
        ctx.inputs = [None if isinstance(t, Tensor) else t for t in inputs]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError


def test_inputs_that_torch_saves_by_an_autograd_function(monkeypatch):
    def save_inputs(self: Any, *args: Any) -> None:
        self.saver = _Save.apply(torch.empty(0, requires_grad=True), *args)

    def get_inputs(self: Any) -> list[Any]:
        saved = iter(self.saver.grad_fn.saved_tensors)
        return [next(saved) if arg is None else arg for arg in self.saver.grad_fn.inputs][1:]

    monkeypatch.setattr(torch_checkpoint._CheckpointFrame, "save_inputs", save_inputs)
    monkeypatch.setattr(torch_checkpoint._CheckpointFrame, "get_inputs", get_inputs)
    model, x = Stack(), tokens()
    wanted = gradients(model, model(x), x)
    with saves(monkeypatch) as seen, longspan.offload_checkpoints(min_offload_bytes=1):
        assert all(map(torch.equal, gradients(model, model(x), x), wanted))
    assert len(seen) == LAYERS - 1


class Stream:
    """Writes down what it is told, as streams of a device are."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"{self.name}'s {self.events}"


class Device:
    def __init__(self, log: list[str]) -> None:
        self.log, self.current = log, Stream("compute", log)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def stream(self, stream: Stream) -> Any:
        return contextlib.nullcontext(self.log.append(f"on {stream.name}"))


def test_copies_on_a_stream_wait_for_what_they_need():
    log: list[str] = []
    copier: Any = host.StreamCopier.__new__(host.StreamCopier)
    copier.device, copier.module, copier.stream = torch.device("cpu"), Device(log), Stream("side", log)
    pool, x = host.Pool(1, False), torch.randn(3, 4)
    buffer = pool.take(48, x.device)
    saved = copier.save(x, buffer)
    copier.wait(saved)
    target, fetched = copier.fetch(buffer, host.Layout.of(x))
    copier.wait(fetched)
    assert torch.equal(target, x)
    assert log == [
        "side waits for compute",
        "on side",
        "compute waits for side's 1",
        "side waits for compute",
        "side waits for side's 1",  # the buffer's last use, which may have been on another device
        "on side",
        "compute waits for side's 2",
    ]


def test_the_smallest_buffer_that_fits_is_taken():
    pool, cpu = host.Pool(9, False), torch.device("cpu")
    made = [pool.take(nbytes, cpu) for nbytes in (1000, 100, 400)]
    for buffer in made:
        pool.give(buffer)
    assert pool.take(90, cpu) is made[1]
    assert pool.take(300, cpu) is made[2]
    assert pool.take(2000, cpu) is made[0]
    assert made[0].nbytes == 2048


class _Pinned(Tensor):
    @staticmethod
    def __new__(cls, tensor: Tensor) -> Any:
        return tensor.as_subclass(cls)

    def is_pinned(self, device: Any = None) -> bool:
        return True


def test_pinned_memory_is_checked():
    pool = host.Pool(1, True, lambda nbytes, pinned: torch.empty(nbytes, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"asked to be pinned.*use_pin_memory=False"):
        pool.take(100, torch.device("cuda"))
    pool.allocate = lambda nbytes, pinned: _Pinned(torch.empty(nbytes, dtype=torch.uint8))
    pool.give(buffer := pool.take(100, torch.device("cuda")))
    assert buffer.pinned
    assert not pool.take(100, torch.device("cpu")).pinned
    assert pool.take(100, torch.device("cuda")) is buffer
    assert host.Pool(1, False).take(100, torch.device("cuda")).nbytes == 128
