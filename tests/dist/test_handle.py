"""What the handle of a prepared model promises: several models, copies, removal, eval, gathering, log-probabilities."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import longspan
from dense import TOLERANCE, apart, relative
from longspan.errors import BatchError, ConfigError, ModelError, TopologyError
from longspan.keep import Keep, Memory
from models import VOCABULARY, Rows, WideMode, build, gradients, one_device
from pool import RunRanks
from test_parity import PACKED, RAGGED, Errors, compare, exact, worst
from test_stream import wide

pytestmark = pytest.mark.dist

MEMORIES: dict[str, Any] = {"whole": "auto", "tiles": Memory(4, Keep.X_O)}

PADDED = Rows([[13, 4], [29], [1, 1, 8]])


def train(handle: Any, *batches: Rows) -> float:
    """Run forward for all batches, then backward for all; return the sum of the losses."""
    losses = [handle.model(**handle.shard(rows.batch())).loss for rows in batches]
    torch.stack(losses).sum().backward()
    handle.reduce_gradients()
    return float(sum(losses).detach())  # type: ignore[union-attr]


def summed(model: torch.nn.Module, *batches: Rows) -> dict[str, Tensor]:
    """Add up the one-device gradients of each batch's own mean."""
    each = [one_device(model, [rows])[1] for rows in batches]  # type: ignore[arg-type]
    return {name: torch.stack([grads[name] for grads in each]).sum(0) for name in each[0]}


def two_models() -> list[Errors]:
    """A student on the ring and a teacher under Ulysses, with their forwards interleaved."""
    found = []
    with WideMode():
        models = [build("llama"), build("qwen2", seed=1)]
        wanted = [one_device(models[0], [PACKED])[1], one_device(models[1], [RAGGED])[1]]
        handles = [longspan.prepare(models[0], 2, ring_degree=2), longspan.prepare(models[1], 2, ulysses_degree=2)]
        outs = [h.model(**h.shard(rows.batch())) for h, rows in zip(handles, (PACKED, RAGGED), strict=True)]
        for handle, out, true in zip(handles, outs, wanted, strict=True):
            out.loss.backward()
            handle.reduce_gradients()
            found.append(compare(handle.model, true))
    return found


def test_two_prepared_models_with_different_degrees(run_ranks: RunRanks) -> None:
    for results in run_ranks(2, two_models):
        assert exact(results), worst(results)


def other_models_part() -> str:
    ulysses = longspan.prepare(build("llama"), 2, ulysses_degree=2)
    model = build("llama")
    longspan.prepare(model, 2, ring_degree=2)
    with pytest.raises(BatchError, match="sharded for ulysses 2 x ring 1, this model is prepared for 1 x 2") as error:
        model(**ulysses.shard(PACKED.batch()))
    return str(error.value)


def test_a_part_of_another_model_is_refused(run_ranks: RunRanks) -> None:
    assert all("this model's handle" in told for told in run_ranks(2, other_models_part))


def two_forwards(memory: str) -> Errors:
    with wide():
        model = build("llama")
        wanted = summed(model, PACKED, RAGGED)
        handle = longspan.prepare(model, 2, ring_degree=2, memory=MEMORIES[memory])
        train(handle, PACKED, RAGGED)
    return compare(model, wanted)


@pytest.mark.parametrize("memory", MEMORIES)
def test_two_forwards_before_one_backward(run_ranks: RunRanks, memory: str) -> None:
    results = run_ranks(2, two_forwards, memory)
    assert exact(results), worst(results)


def recomputed() -> Errors:
    """Let torch recompute the whole forward in backward, another batch having run in between."""
    from torch.utils.checkpoint import checkpoint

    with WideMode():
        model = build("llama")
        wanted = summed(model, PACKED)
        handle = longspan.prepare(model, 2, ulysses_degree=2)
        part = handle.shard(PACKED.batch())

        def forward() -> Tensor:
            with WideMode():  # autograd leaves function modes
                return model(**part).loss

        loss: Any = checkpoint(forward, use_reentrant=False)
        with torch.no_grad():
            model(**handle.shard(RAGGED.batch()))
        loss.backward()
        handle.reduce_gradients()
    return compare(model, wanted)


def test_recompute_uses_the_context_of_its_own_batch(run_ranks: RunRanks) -> None:
    results = run_ranks(2, recomputed)
    assert exact(results), worst(results)


def copied(memory: str) -> tuple[Errors, Errors, bool]:
    with wide():
        model = build("llama")
        handle = longspan.prepare(model, 2, memory=MEMORIES[memory])
        train(handle, RAGGED)
        other = copy.deepcopy(model)
        theirs = longspan.prepare(other, 2, memory=MEMORIES[memory])
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        other.zero_grad()
        model.zero_grad()
        untouched = {name: p.clone() for name, p in model.named_parameters()}
        wanted = summed(build("llama"), PACKED)
        plain = build("llama")
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(1.1)
        wanted_other = summed(plain, PACKED)
        train(theirs, PACKED)
        same = all(torch.equal(p, untouched[n]) and p.grad is None for n, p in model.named_parameters())
        train(handle, PACKED)
    return compare(model, wanted), compare(other, wanted_other), same and theirs is not handle


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_deepcopy_is_independent(run_ranks: RunRanks, memory: str) -> None:
    results = run_ranks(2, copied, memory)
    assert all(exact(found[:2]) and found[2] for found in results), results


def state(model: torch.nn.Module) -> dict[str, Any]:
    """Return all that a module tree holds, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules", "config"):
                found[f"{name}.{key}"] = copy.deepcopy(value) if isinstance(value, dict | list) else value
    found |= {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    return found | {"config": model.config.to_dict(), "attention": model.config._attn_implementation}  # type: ignore[union-attr, operator]


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, Tensor) else a is b or a == b


def removed(family: str, memory: str) -> list[str]:
    """Return what differs after prepare, a step and remove; bits included."""
    model = build(family)
    ids = RAGGED.batch()["input_ids"]
    model(input_ids=ids, use_cache=False)
    before = state(model)
    logits = model(input_ids=ids, use_cache=False).logits
    handle = longspan.prepare(model, 2, memory=MEMORIES[memory])
    model.eval()
    with torch.no_grad():
        model(**handle.shard(RAGGED.batch()))
    model.train()
    with handle.bypass():
        handle.remove()
    handle.remove()
    after = state(model)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)
    again = longspan.prepare(model, 2, ring_degree=2)
    assert again is not handle
    assert "_longspan_applied" in vars(model)
    again.remove()
    return [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3-moe"])
def test_remove_restores_the_model_bit_by_bit(run_ranks: RunRanks, family: str, memory: str) -> None:
    for changed in run_ranks(2, removed, family, memory):
        assert [name for name in changed if "long_inv_freq" not in name] == []  # a table that transformers keeps


def prepared_twice() -> str:
    model = build("llama")
    handle = longspan.prepare(model, 2)
    assert longspan.prepare(model, 2) is handle
    forward = model.__dict__["forward"]
    assert not hasattr(forward.original, "applied")
    with pytest.raises(ConfigError, match="prepared already") as error:
        longspan.prepare(model, 2, ring_degree=2)
    return str(error.value)


def test_prepare_is_idempotent(run_ranks: RunRanks) -> None:
    assert all("call handle.remove()" in told for told in run_ranks(2, prepared_twice))


def evaluated() -> Errors:
    with WideMode():
        model = build("llama")
        loss, wanted, _ = one_device(model, [RAGGED])
        handle = longspan.prepare(model, 2, logits=True)
        model.eval()
        with torch.no_grad():
            out = model(**handle.shard(RAGGED.batch()))
        part = handle.shard(RAGGED.batch())
        full = handle.gather(out.logits, part)
        with handle.bypass():
            plain = alone(model, RAGGED)
        found = {"loss": apart(float(out.loss), loss), "logits": relative(full, plain)}
        train(handle, RAGGED)  # gradients in eval mode are those of the same formula
    return found | compare(model, wanted)


def alone(model: Any, rows: Rows) -> Tensor:
    """Return the plain model's logits [B, S, V] of each document by itself; 0 on padding."""
    batch = rows.batch()
    full = torch.zeros(*batch["input_ids"].shape, VOCABULARY, dtype=torch.float64)
    for i, lengths in enumerate(rows.documents):
        start = 0
        for length in lengths:
            ids = batch["input_ids"][i : i + 1, start : start + length]
            full[i, start : start + length] = model(input_ids=ids, use_cache=False).logits[0]
            start += length
    return full


def test_eval_runs_sharded_with_the_same_formula(run_ranks: RunRanks) -> None:
    results = run_ranks(2, evaluated)
    assert exact(results), worst(results)


def plain_eval() -> float:
    model = build("llama")
    plain = copy.deepcopy(model).eval()
    handle = longspan.prepare(model, 2, sequence_parallel_in_eval=False)
    batch = {"input_ids": RAGGED.batch()["input_ids"], "use_cache": False}
    part = handle.shard(RAGGED.batch())
    model.eval()
    with pytest.raises(BatchError, match=r"sharded batch was given to the plain model in eval"):
        model(**part)
    found = model(**batch).logits
    assert model.config._attn_implementation == "longspan"
    model.train()
    model(**part).loss.backward()
    with pytest.raises(BatchError, match="was given a full batch"):
        model(**batch)
    return relative(found, plain(**batch).logits)


def test_eval_can_be_left_to_the_plain_model(run_ranks: RunRanks) -> None:
    assert run_ranks(2, plain_eval) == [0.0, 0.0]


def generated() -> bool:
    model = build("llama").eval()
    ids = torch.arange(1, 8)[None]
    wanted = copy.deepcopy(model).generate(ids, max_new_tokens=6, do_sample=False)
    handle = longspan.prepare(model, 2)
    with pytest.raises(BatchError, match=r"handle.bypass\(\)"):
        model.generate(ids, max_new_tokens=2)
    with handle.bypass() as plain, handle.bypass():
        assert plain is model
        found = model.generate(ids, max_new_tokens=6, do_sample=False)
        with pytest.raises(BatchError, match="sharded batch was given to the plain model inside handle.bypass"):
            model(**handle.shard(PACKED.batch()))
    with pytest.raises(ZeroDivisionError), handle.bypass():
        raise ZeroDivisionError
    assert not handle.bypassed
    return torch.equal(found, wanted)  # type: ignore[arg-type]


def test_generate_works_inside_bypass(run_ranks: RunRanks) -> None:
    assert run_ranks(2, generated) == [True, True]


def gathered(ulysses: int, ring: int, memory: str) -> list[bool]:
    handle = longspan.prepare(build("llama"), ulysses * ring, ulysses_degree=ulysses, memory=MEMORIES[memory])
    checks = []
    for rows in (PACKED, PADDED, Rows([[1]])):
        batch = rows.batch()
        part = handle.shard(batch)
        ids = handle.gather(part["input_ids"], part)
        real = batch.get("attention_mask", torch.ones_like(ids)).bool()
        checks += [torch.equal(ids, batch["input_ids"] * real), ids.dtype == torch.long]
        hostile = part["input_ids"][..., None].double() * torch.ones(3, dtype=torch.float64)
        hostile = torch.where(part["shift_labels"][..., None] == -100, torch.nan, hostile)
        full = handle.gather(hostile, part["longspan"])
        checks += [full.shape == (*ids.shape, 3), bool((full[~real] == 0).all())]
        flags = handle.gather(part["input_ids"] > 5, part)
        checks.append(torch.equal(flags, (batch["input_ids"] > 5) & real))
        with pytest.raises(BatchError, match="gather takes"):
            handle.gather(part["input_ids"][:, :-1].repeat(1, 3), part)
        with pytest.raises(BatchError, match="Pass the part"):
            handle.gather(part["input_ids"], {})
    return checks


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (1, 2), (2, 2), (4, 1)])
def test_gather_restores_order_and_length(run_ranks: RunRanks, ulysses: int, ring: int, memory: str) -> None:
    assert all(all(checks) for checks in run_ranks(ulysses * ring, gathered, ulysses, ring, memory))


def own_loss(grad_reduction: str, via: str) -> Errors:
    """Train with a loss of one's own on what is gathered: each rank computes the same from all tokens."""
    rows = PADDED
    with WideMode():
        model = build("llama")
        loss, wanted, targets = one_device(model, [rows])
        handle = longspan.prepare(model, 4, ring_degree=2, logits=via == "logits", grad_reduction=grad_reduction)  # type: ignore[arg-type]
        batch = rows.batch()
        part = handle.shard(batch)
        if via == "logits":
            logits = handle.gather(model(**part).logits, part)
            labels = handle.gather(part["shift_labels"], part).masked_fill(~real_tokens(batch), -100)
            mine = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / targets
        else:
            mine = -handle.token_logps(part, gather=True).sum() / targets
        mine.backward()
        handle.reduce_gradients()
    return compare(model, wanted) | {"loss": apart(float(mine.detach()), loss)}


def real_tokens(batch: dict[str, Any]) -> Tensor:
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


@pytest.mark.parametrize("grad_reduction", ["mean", "sum"])
@pytest.mark.parametrize("via", ["logits", "logps"])
def test_a_loss_on_gathered_tokens_has_the_gradients_of_one_device(
    run_ranks: RunRanks, grad_reduction: str, via: str
) -> None:
    results = run_ranks(4, own_loss, grad_reduction, via)
    assert exact(results), worst(results)


def log_probabilities() -> Errors:
    rows = PADDED
    with WideMode():
        model = build("llama-tied")
        plain = copy.deepcopy(model)
        handle = longspan.prepare(model, 2, ring_degree=2)
        part = handle.shard(rows.batch())
        logps, entropy = handle.token_logps(part, entropy=True, gather=True)
        local = handle.token_logps(part)
        logs = alone(plain, rows).log_softmax(-1)
        targets = handle.gather(part["shift_labels"], part)
        masked = ~real_tokens(rows.batch()) | (targets == -100)
        targets = targets.masked_fill(masked, 0)
        true = logs.gather(-1, targets[..., None])[..., 0].masked_fill(masked, 0)
        true_entropy = -(logs.exp() * logs).sum(-1).masked_fill(masked, 0)
        (logps.sum() + 0.3 * entropy.square().sum()).backward()
        handle.reduce_gradients()
        (true.sum() + 0.3 * true_entropy.square().sum()).backward()
    found = {
        "logps": relative(logps.detach(), true.detach()),
        "entropy": relative(entropy.detach(), true_entropy.detach()),
        "local": relative(handle.gather(local, part).detach(), true.detach()),
    }
    return found | compare(model, gradients(plain))


def test_token_logps_equal_log_softmax(run_ranks: RunRanks) -> None:
    results = run_ranks(2, log_probabilities)
    assert exact(results), worst(results)


def with_embeddings() -> Errors:
    """Give inputs_embeds in place of input_ids."""
    with WideMode():
        model = build("llama")
        _, wanted, _ = one_device(model, [PACKED])
        handle = longspan.prepare(model, 2, ring_degree=2)
        batch = PACKED.batch()
        embeds = model.get_input_embeddings()(batch.pop("input_ids"))
        model(**handle.shard(batch | {"inputs_embeds": embeds})).loss.backward()
        handle.reduce_gradients()
    return compare(model, wanted)


def test_embeddings_can_be_given_in_place_of_ids(run_ranks: RunRanks) -> None:
    results = run_ranks(2, with_embeddings)
    assert exact(results), worst(results)


def leak(ulysses: int, ring: int, dtype: torch.dtype, memory: str) -> tuple[bool, bool]:
    """Change one token of the first document: does a bit of the second's logits move, and does the first's?"""
    model = build("llama", dtype)
    handle = longspan.prepare(model, ulysses * ring, ulysses_degree=ulysses, logits=True, memory=MEMORIES[memory])
    batch = Rows([[22, 25]]).batch()
    logits = []
    for _ in range(2):
        part = handle.shard(batch)
        with torch.no_grad():
            logits.append(handle.gather(handle.model(**part).logits, part))
        batch["input_ids"][0, 3] = batch["input_ids"][0, 3] % (VOCABULARY - 1) + 1
    moved = (logits[0] != logits[1]).any(-1)[0]
    return bool(moved[22:].any()), bool(moved[3:22].all()) and not bool(moved[:3].any())


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize(
    ("dtype", "memory"),
    [(torch.float32, "whole"), (torch.bfloat16, "whole"), (torch.float32, "tiles")],
    ids=["fp32", "bf16", "tiles"],
)
def test_documents_do_not_see_each_other(
    run_ranks: RunRanks, ulysses: int, ring: int, dtype: torch.dtype, memory: str
) -> None:
    assert run_ranks(ulysses * ring, leak, ulysses, ring, dtype, memory) == [(False, True)] * (ulysses * ring)


def on_a_host_mesh(names: tuple[str, ...], shape: tuple[int, ...]) -> Errors:
    """Use the sequence axis of the host's own mesh, wherever it stands."""
    batches = [Rows([[30, 2]]), Rows([[5], [13]], seed=1)]
    with WideMode():
        model = build("llama")
        _, wanted, targets = one_device(model, batches)
        host = init_device_mesh("cpu", shape, mesh_dim_names=names)
        handle = longspan.prepare(model, 2, mesh=host)
        axis = next(name for name in names if name in ("sp", "cp"))
        assert handle.mesh.sequence.ranks == tuple(host[axis].mesh.tolist())
        rows = batches[handle.mesh.data.rank]
        model(**handle.shard(rows.batch(), num_items=targets)).loss.backward()
        handle.reduce_gradients()
    return compare(model, wanted)


@pytest.mark.parametrize(
    ("names", "shape"), [(("dp", "sp"), (2, 2)), (("cp", "dp_shard"), (2, 2)), (("a", "sp", "b"), (1, 2, 2))]
)
def test_a_host_mesh_says_who_shares_a_sequence(
    run_ranks: RunRanks, names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    results = run_ranks(4, on_a_host_mesh, names, shape)
    assert exact(results), worst(results)


def refused_topologies() -> list[str]:
    told = []
    for names, size, match in [
        (("dp", "tp"), 2, "exactly one axis named 'sp' or 'cp'"),
        (("sp", "cp"), 2, "exactly one axis named 'sp' or 'cp'"),
        (("dp", "sp"), 4, "axis 'sp' has 2 ranks, sequence_parallel_size is 4"),
    ]:
        host = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(TopologyError, match=match) as error:
            longspan.prepare(build("llama"), size, mesh=host)
        told.append(str(error.value))
    for options, match in [
        ({"sequence_parallel_size": 3}, r"does not divide the 4 processes; use one of \[1, 2, 4\]"),
        ({"sequence_parallel_size": 8}, "does not divide the 4 processes"),
        ({"sequence_parallel_size": 0}, "at least 1"),
        ({"sequence_parallel_size": 4, "ulysses_degree": 3}, "must be sequence_parallel_size"),
        ({"sequence_parallel_size": 4, "ring_degree": 4, "ulysses_degree": 4}, "must be sequence_parallel_size"),
    ]:
        with pytest.raises(TopologyError, match=match) as error:
            longspan.prepare(build("llama"), **options)  # type: ignore[arg-type]
        told.append(str(error.value))
    with pytest.raises(TopologyError, match="would leave ranks without a query head: the model has 2"):
        longspan.prepare(build("two-heads"), 4, ulysses_degree=4)
    return told


def test_impossible_topologies_are_refused(run_ranks: RunRanks) -> None:
    told = run_ranks(4, refused_topologies)
    assert all(len(each) == 8 for each in told)


def unlike_batches(differ: str) -> str:
    """Give the two ranks of a sequence different batches."""
    rank = dist.get_rank()
    handle = longspan.prepare(build("llama"), 2)
    rows = Rows([[20 + 4 * rank]]) if differ == "shapes" else Rows([[20]], seed=rank)
    batch = rows.batch()
    if differ == "labels":
        batch = Rows([[20]]).batch()
        batch["labels"][0, 3] += rank
    with pytest.raises(BatchError) as told:
        handle.model(**handle.shard(batch))
    return str(told.value)


@pytest.mark.parametrize("differ", ["tokens", "shapes", "labels"])
def test_ranks_of_a_sequence_must_share_their_batches(run_ranks: RunRanks, differ: str) -> None:
    for told in run_ranks(2, unlike_batches, differ):
        assert "were given different batches" in told


def on_a_slice() -> str:
    """Prepare on the sequence axis cut out of the host's mesh, which does not tell who holds other batches."""
    host = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    with pytest.raises(TopologyError) as told:
        longspan.prepare(build("llama"), 2, mesh=host["sp"])
    return str(told.value)


def test_a_slice_of_the_hosts_mesh_is_refused(run_ranks: RunRanks) -> None:
    for told in run_ranks(4, on_a_slice):
        assert "is a part of a mesh ['dp', 'sp']: pass the whole one" in told


def outside_the_mesh() -> str:
    """Prepare on a mesh of two of three processes."""
    host = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "sp"))
    model = build("llama")
    if dist.get_rank() == 2:
        with pytest.raises(TopologyError) as error:
            longspan.prepare(model, 2, mesh=host)
        return str(error.value)
    handle = longspan.prepare(model, 2, mesh=host)
    model(**handle.shard(PACKED.batch())).loss.backward()
    handle.reduce_gradients()
    return ""


def test_a_process_outside_the_mesh_is_told_so(run_ranks: RunRanks) -> None:
    told = run_ranks(3, outside_the_mesh)
    assert told[:2] == ["", ""]
    assert "Process 2 is not part of the mesh of processes [0, 1]" in told[2]


def wrapped_first() -> list[str]:
    told = []
    for wrap in (
        nn.parallel.DistributedDataParallel,
        fully_shard,
        lambda model: fully_shard(model.model.layers[0]) and model,
    ):
        with pytest.raises(ModelError) as error:
            longspan.prepare(wrap(build("llama", torch.float32)), 2)
        told.append(str(error.value))
    return told


def test_prepare_comes_before_engines(run_ranks: RunRanks) -> None:
    for ddp, whole, part in run_ranks(2, wrapped_first):
        assert "wrapped by DistributedDataParallel. Call longspan.prepare first (after PEFT), then" in ddp
        assert "Call longspan.prepare first" in whole
        assert "Call longspan.prepare first, then fully_shard" in part


def frozen(trained: str) -> Errors:
    """Train the head alone, or the embedding alone."""
    with WideMode():
        model = build("llama")
        _, wanted, _ = one_device(model, [PACKED])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        handle = longspan.prepare(model, 2, ring_degree=2)
        train(handle, PACKED)
    found = gradients(model)
    assert len(found) == 1
    return {name: relative(found[name], wanted[name]) for name in found}


@pytest.mark.parametrize("trained", ["lm_head", "embed_tokens", "layers.1.self_attn.k_proj"])
def test_frozen_parameters_stay_out_of_the_way(run_ranks: RunRanks, trained: str) -> None:
    results = run_ranks(2, frozen, trained)
    assert exact(results), worst(results)


def reported_losses(dtype: torch.dtype) -> list[float]:
    handle = longspan.prepare(build("llama", dtype), 2, ring_degree=2)
    return [float(handle.model(**handle.shard(rows.batch())).loss.detach()) for rows in (PACKED, RAGGED, Rows([[1]]))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_rank_reports_the_same_loss(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    first, *others = run_ranks(4, reported_losses, dtype)
    assert all(other == first for other in others)
    assert first[2] == 0.0


def saved(folder: str) -> bool:
    """Save a prepared model, and load it as any other."""
    model = build("llama", torch.float32)
    handle = longspan.prepare(model)
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).train()
    assert "longspan" not in Path(folder, "config.json").read_text()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    ids = torch.arange(1, 9)[None]
    with handle.bypass():
        loaded.set_attn_implementation("eager")
        return same and torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)


def test_a_prepared_model_saves_as_a_plain_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(1, saved, str(tmp_path)) == [True]


def under_autocast() -> tuple[float, float]:
    """Compare bf16 autocast on two ranks with the same on one: both are roundings of the same numbers."""
    model = build("llama", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)  # weights with which roundings do not grow from layer to layer
    _, wanted, _ = one_device(copy.deepcopy(model).double(), [PACKED])
    plain = copy.deepcopy(model)
    handle = longspan.prepare(model, 2, ring_degree=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**handle.shard(PACKED.batch()))
    out.loss.backward()
    handle.reduce_gradients()
    with torch.autocast("cpu", torch.bfloat16):
        total: Any = 0.0
        for ids, labels in PACKED.alone():
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total += F.cross_entropy(logits.float(), labels[1:], reduction="sum")
    (total / PACKED.targets()).backward()

    def far(m: torch.nn.Module) -> float:
        return max(float((g.double() - wanted[n]).norm() / wanted[n].norm()) for n, g in gradients(m).items())

    assert all(p.grad.dtype == torch.float32 for p in model.parameters())  # type: ignore[union-attr]
    return far(model), far(plain)


def test_autocast_is_as_close_as_on_one_device(run_ranks: RunRanks) -> None:
    for ours, theirs in run_ranks(2, under_autocast):
        assert 1e-4 < theirs < 0.2, "the baseline rounds"
        assert ours < 1.5 * theirs


def with_lora(target: list[str]) -> Errors:
    peft = pytest.importorskip("peft")
    with WideMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = build("llama")
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=target, lora_dropout=0.0))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        model = model.double()
        plain = copy.deepcopy(model)
        handle = longspan.prepare(model, 2, ring_degree=2)
        out = model(**handle.shard(PACKED.batch()))
        out.loss.backward()
        handle.reduce_gradients()
        total: Any = 0.0
        for ids, labels in PACKED.alone():
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total += F.cross_entropy(logits, labels[1:], reduction="sum") / PACKED.targets()
        total.backward()
        wanted, found = gradients(plain), gradients(model)
    assert all("lora" in name for name in wanted)
    errors = {name: relative(found[name], wanted[name]) for name in wanted}
    return errors | {"loss": relative(out.loss.detach(), total.detach())}


@pytest.mark.parametrize("target", [["q_proj", "v_proj", "down_proj"], ["k_proj", "lm_head", "embed_tokens"]])
def test_lora_gradients_equal_one_device(run_ranks: RunRanks, target: list[str]) -> None:
    pytest.importorskip("peft")
    results = run_ranks(2, with_lora, target)
    assert exact(results), worst(results)


def unused_parameters() -> list[bool]:
    """An expert that only one rank's tokens reach gets its gradient everywhere, one that none reach has none."""
    model = build("qwen3-moe")
    handle = longspan.prepare(model, 2)
    extra = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.register_parameter("unused", extra)
    lonely = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.register_parameter("lonely", lonely)
    if dist.get_rank() == 1:
        (lonely * 3).sum().backward()
    model(**handle.shard(Rows([[3]]).batch())).loss.backward()
    handle.reduce_gradients()
    return [extra.grad is None, lonely.grad is not None and lonely.grad.tolist() == [1.5] * 3]


def test_gradients_that_exist_on_some_ranks_only_are_reduced(run_ranks: RunRanks) -> None:
    assert run_ranks(2, unused_parameters) == [[True, True]] * 2


def counted_syncs(layers: int) -> int:
    """Count the reads of tensor values on the host in a forward and backward pass."""
    model = build("llama", layers=layers)
    handle = longspan.prepare(model, 2, ring_degree=1)
    part = handle.shard(PACKED.batch(), num_items=PACKED.targets())
    reads = 0

    def counting(name: str) -> Callable[..., Any]:
        right = getattr(Tensor, name)

        def read(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return right(*args)

        return read

    with ExitStack() as stack:
        for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            stack.enter_context(patch.object(Tensor, name, counting(name)))
        assert int(torch.tensor(1)) == 1
        assert reads > 0, "the count counts"
        reads = 0
        model(**part).loss.backward()
    return reads


def test_no_layer_reads_a_tensor_on_the_host(run_ranks: RunRanks) -> None:
    few, many = run_ranks(2, counted_syncs, 2), run_ranks(2, counted_syncs, 5)
    assert few == many


def accuracy_of_far_positions(first: int) -> tuple[float, float, float]:
    """Shift a document far out: tables against exact angles, and the loss against that of the document at 0."""
    model = build("llama")
    tables: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda m, a, kw: tables.extend(kw["position_embeddings"]), with_kwargs=True
    )
    handle = longspan.prepare(model, 2, ring_degree=2)
    losses = []
    for start in (0, first):
        tables.clear()
        batch = PACKED.batch()
        batch["position_ids"] = torch.arange(41)[None] + start
        part = handle.shard(batch)
        with torch.no_grad():
            losses.append(float(model(**part).loss))
    angles = part["position_ids"][..., None].double() * model.model.rotary_emb.inv_freq.double()  # type: ignore[union-attr, operator]
    exact_tables = [torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin)]
    error = max(float((found - true).abs().max()) for found, true in zip(tables, exact_tables, strict=True))
    with handle.bypass():
        own = model.model.rotary_emb(tables[0], part["position_ids"])  # type: ignore[operator]
    theirs = max(float((found - true).abs().max()) for found, true in zip(own, exact_tables, strict=True))
    return error, theirs, abs(losses[1] - losses[0]) / losses[0]


def test_far_positions_have_exact_angles(run_ranks: RunRanks) -> None:
    for error, theirs, moved in run_ranks(2, accuracy_of_far_positions, 5_000_000):
        assert error < 1e-8
        assert theirs > 1e-3, "in fp32 the angles are lost"
        assert moved < 1e-7, "attention sees distances alone"


def near_positions(last: int) -> bool:
    """Compare the tables of a shard, bit by bit, with those that the model makes itself."""
    model = build("llama", torch.float32)
    tables: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda m, a, kw: tables.extend(kw["position_embeddings"]), with_kwargs=True
    )
    handle = longspan.prepare(model, 2, ring_degree=2)
    batch = PACKED.batch()
    batch["position_ids"] = torch.arange(last - 40, last + 1)[None]
    part = handle.shard(batch)
    tables.clear()
    with torch.no_grad():
        model(**part)
    with handle.bypass():
        own = model.model.rotary_emb(tables[0], part["position_ids"])  # type: ignore[operator]
    return all(torch.equal(a, b) for a, b in zip(tables, own, strict=True))


def test_near_positions_have_the_models_own_bits(run_ranks: RunRanks) -> None:
    assert run_ranks(2, near_positions, 32767) == [True, True]
    assert run_ranks(2, near_positions, 32768 + 40) == [False, False]


def test_tolerance_is_far_below_fp32() -> None:
    """Guards the constant that all of these tests lean on."""
    assert torch.finfo(torch.float32).eps / 100 > TOLERANCE


def fit_case() -> tuple[list[int], list[int]]:
    """Count the kernel's calls of a fit and of a step, and what is kept meanwhile."""
    model = build("llama")
    handle = longspan.prepare(model, dist.get_world_size(), memory=Memory(4, Keep.X_O))
    calls = [0, 0]
    (attend,) = handle.attends.values()
    kernel = type(attend.kernel)
    forward, backward = kernel.forward, kernel.backward

    def counted(self: Any, *args: Any) -> Any:
        calls[0] += 1
        return forward(self, *args)

    def counted_backward(self: Any, *args: Any) -> Any:
        calls[1] += 1
        return backward(self, *args)

    part = handle.shard(Rows([[90]]).batch())
    with patch.object(kernel, "forward", counted), patch.object(kernel, "backward", counted_backward):
        with handle.fit():
            model(**part).loss.backward()
        fitted, calls[:] = list(calls), [0, 0]
        model(**part).loss.backward()
    return fitted, calls


def test_fit_attends_in_a_few_calls_only(run_ranks: RunRanks) -> None:
    for fitted, whole in run_ranks(2, fit_case):
        assert fitted == [8, 8]
        assert min(whole) > 16
