"""Images divided over ranks, the way of their features, and what a batch with images is refused for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import longspan
from longspan.batch import CONTEXT, cut, shard_batch, uncut
from longspan.check.images import with_images
from longspan.check.samples import samples
from longspan.documents import Documents
from longspan.errors import BatchError, ModelError
from longspan.images import Frames, Route
from longspan.integrations.multimodal import sight_of, text_vocabulary
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model
from longspan.integrations.shapes import model_shape
from longspan.integrations.transformers.config import own_config
from longspan.keep import Keep, Memory
from longspan.layout import Layout
from longspan.mesh import Axis, Mesh
from pictures import IMAGE, VIDEO, Album, build

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))


@given(st.lists(SIZES, max_size=12), st.integers(1, 5))
def test_frames_are_divided_evenly(sizes: list[tuple[int, int, int]], ranks: int) -> None:
    frames = Frames.of([torch.tensor(sizes, dtype=torch.long).reshape(-1, 3) * torch.tensor([1, 2, 2])], 2)
    shares = frames.divide(ranks)
    assert sorted(frame for share in shares for frame in share) == list(range(sum(t for t, _, _ in sizes)))
    assert all(share == sorted(share) for share in shares)
    loads = [int(frames.patches[share].sum()) for share in shares]
    assert max(loads) - min(loads) <= max(frames.patches.tolist(), default=0)


@settings(deadline=None)
@given(
    st.lists(SIZES, max_size=4),
    st.lists(SIZES, max_size=3),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    st.data(),
)
def test_each_token_gets_its_row(images: Any, videos: Any, degrees: tuple[int, int], data: st.DataObject) -> None:
    """Carry rows by hand, as the exchange does, and put the parts of all ranks together."""
    grids = [
        torch.tensor(sizes, dtype=torch.long).reshape(-1, 3) * torch.tensor([1, 2, 2]) for sizes in (images, videos)
    ]
    frames, first = Frames.of(grids, 2), int(grids[0].prod(1).sum()) // 4
    total = int(frames.rows.sum())
    tokens = total + data.draw(st.integers(1, 9))
    order = torch.tensor(data.draw(st.permutations(range(tokens))))
    places = torch.where(order < total, 0, -1)
    image = (places == 0) & (order < first)
    video = (places == 0) & ~image
    places[image], places[video] = torch.arange(first), torch.arange(first, total)
    layout = Layout(tokens, degrees[1], degrees[0])
    routes = [Route.of(places[None], first, frames, layout, rank) for rank in range(layout.size)]
    ids = torch.arange(total).split(frames.rows.tolist())
    sent = []
    for route in routes:
        mine = torch.cat([torch.empty(0, dtype=torch.long), *(ids[frame] for frame in route.frames)])
        sent.append(mine[route.send].split(route.sent))
    parts = []
    for rank, route in enumerate(routes):
        arrived = torch.cat([rows[rank] for rows in sent])
        assert tuple(len(rows[rank]) for rows in sent) == route.received
        rows, part = arrived[route.order], cut(places[None], layout, rank, -1)
        part[(part >= 0) & (part < first)] = rows[: route.images]
        part[part >= first] = rows[route.images :]
        parts.append(part)
    assert torch.equal(uncut(parts, layout)[0], places)


@contextmanager
def prepared(family: str = "qwen3_vl", **options: Any) -> Iterator[Any]:
    with redirect_stderr(io.StringIO()):
        handle = longspan.prepare(build(family), **options)
    yield handle
    handle.remove()


GOOD = Album("qwen3_vl", (((3, (2, 2), 2, (1, 3), 4, (2, 1, 1), 5),),))


def without(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in names}


def changed(**fields: Any) -> dict[str, Any]:
    return GOOD.batch() | fields


IDS, GRID, PIXELS = (GOOD.batch()[name] for name in ("input_ids", "image_grid_thw", "pixel_values"))
TYPES = GOOD.batch()["mm_token_type_ids"]
TOKENS = IDS.shape[1]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no pixels": (without(GOOD.batch(), "pixel_values"), "pixel_values and image_grid_thw describe the same images"),
    "no images": (
        without(GOOD.batch(), "pixel_values", "image_grid_thw"),
        "input_ids has 7 tokens 40, which stand for pixel_values, but image_grid_thw makes 0 feature rows",
    ),
    "a token too few": (changed(input_ids=IDS.masked_fill(torch.arange(TOKENS) == 4, 1)), "has 6 tokens 40"),
    "pixels of others": (changed(pixel_values=PIXELS[1:]), r"pixel_values must be \[28, 24\]"),
    "odd grid": (changed(image_grid_thw=GRID + 1), r"multiples of 2; got \[\[2, 5, 5\], \[2, 3, 7\]\]"),
    "no types": (without(GOOD.batch(), "mm_token_type_ids"), "mm_token_type_ids is missing"),
    "other types": (changed(mm_token_type_ids=TYPES * 0), "mm_token_type_ids must be"),
    "positions of text": (changed(position_ids=torch.arange(TOKENS)[None]), r"must be \[3, B, S\], or \[4, B, S\]"),
    "five axes": (changed(position_ids=torch.zeros(5, 1, TOKENS).long()), r"must be integers \[3, 1, 24\]"),
    "negative": (changed(position_ids=torch.arange(TOKENS).expand(3, 1, -1) - 1), "hold negative numbers"),
    "restart": (
        changed(position_ids=(torch.arange(TOKENS) % 20).expand(3, 1, -1)),
        "start again at token 20, and nothing says",
    ),
    "border in an image": (changed(cu_seqlens=[0, 5, TOKENS]), "the document ends inside an image"),
    "joined images": (
        Album("qwen3_vl", (((3, (2, 2), (1, 3), 4),),)).batch(),
        "finds no positions for the images .* one run of its tokens",
    ),
    "images on padding": (
        changed(attention_mask=(torch.arange(TOKENS) < 6)[None].long(), labels=torch.full_like(IDS, -100)),
        "ends inside an image",
    ),
    "image on padding": (
        changed(attention_mask=(torch.arange(TOKENS) < 7)[None].long(), labels=torch.full_like(IDS, -100)),
        "2 images have their tokens on padding",
    ),
    "embeddings": (
        {"inputs_embeds": torch.zeros(1, 5, 24), "labels": torch.ones(1, 5).long()},
        "needs input_ids",
    ),
    "twice": ({CONTEXT: None, **GOOD.batch()}, "sharded already"),
}


@pytest.mark.parametrize(("batch", "told"), REFUSED.values(), ids=REFUSED)
def test_batches_that_are_refused(batch: dict[str, Any], told: str) -> None:
    with prepared() as handle, pytest.raises(BatchError, match=told):
        handle.shard(batch)


def test_calls_that_are_refused() -> None:
    batch = GOOD.batch()
    with prepared() as handle, prepared() as other:
        with pytest.raises(BatchError, match="no labels"):
            handle.model(**handle.shard(without(batch, "labels")))
        with pytest.raises(BatchError, match="given a full batch"):
            handle.model(**batch)
        with handle.bypass(), pytest.raises(BatchError, match="given to the plain model"):
            handle.model(**handle.shard(batch))
        part = other.shard(batch)
        elsewhere = replace(part[CONTEXT], layout=Layout(TOKENS, 2, 1))
        with pytest.raises(BatchError, match="was sharded for ulysses 1 x ring 2"):
            handle.model(**part | {CONTEXT: elsewhere})


def test_loaders_take_batches_with_images() -> None:
    batches = [GOOD.batch(), Album("qwen3_vl", (((9,),),)).batch()]
    with prepared() as handle:
        parts = list(handle.loader(batches, accumulation=2))
        assert [part[CONTEXT].num_items for part in parts] == [
            sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        ] * 2
        assert all(torch.isfinite(handle.model(**part).loss) for part in parts)


def test_axes_are_for_models_that_have_them() -> None:
    batch = {"input_ids": IDS, "position_ids": torch.arange(TOKENS).expand(3, 1, -1)}
    with pytest.raises(BatchError, match="which has no axes of images"):
        shard_batch(batch, Mesh())


def test_positions_are_cut_on_their_last_dim() -> None:
    axes = torch.stack([torch.arange(7), torch.arange(7) * 2, torch.arange(7) * 3])[:, None]
    batch = {"input_ids": torch.ones(1, 7).long(), "position_ids": torch.cat([torch.arange(7)[None, None] % 4, axes])}
    documents = Documents.find(batch, 1, 7)
    assert documents.starts == ((0, 4),)
    assert documents.max_position == 18
    layout = Layout(7, 1, 2)
    assert torch.equal(torch.cat([documents.cut_positions(layout, rank) for rank in (0, 1)], -1)[..., :7], axes)


def test_the_tower_and_other_models_keep_their_attention() -> None:
    config = preset_config("tiny-qwen3-vl")
    model, other = (random_model(config, torch.float32, torch.device("cpu")) for _ in range(2))
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})

    def names(model: Any) -> tuple[str, str]:
        parts = (model.model.language_model, model.model.visual)
        return parts[0].config._attn_implementation, parts[1].config._attn_implementation

    before = [names(model), names(other)]
    with redirect_stderr(io.StringIO()):
        handle = longspan.prepare(model, 1)
    assert [names(model), names(other)] == [("longspan", "sdpa"), before[1]]
    with handle.bypass():
        assert names(model) == before[0]
    handle.remove()
    assert [names(model), names(other)] == before
    for module in model.modules():
        assert not {"forward", "get_image_features", "get_video_features"} & set(vars(module))


def test_a_missing_part_of_a_config_is_no_config_of_modules() -> None:
    """Modules without a config stay so, and the others get a copy of theirs."""
    model = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    config = preset_config("tiny-qwen3-vl")
    config.vision_config = None  # type: ignore[attr-defined]
    text, model[1].config = config.text_config, config.text_config  # type: ignore[attr-defined,assignment]
    own_config(model, config)
    assert "config" not in vars(model) | vars(model[0])
    assert type(model[1].config) is type(text) and model[1].config is not text


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_generation_under_bypass(family: str) -> None:
    batch = without(Album(family, (((3, (2, 2), 2),),)).batch(), "labels")
    model = build(family).eval()
    asked = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(**batch, **asked)
    with redirect_stderr(io.StringIO()):
        handle = longspan.prepare(model, 1)
    handle.model(**handle.shard(batch | {"labels": batch["input_ids"]}))
    with handle.bypass():
        assert torch.equal(model.generate(**batch, **asked), plain)


def test_one_process_leaves_an_unused_tower_alone() -> None:
    """As the plain model does: without a gradient, an optimizer does not touch it."""
    ids = torch.arange(1, 9)[None]
    with prepared() as handle:
        handle.model(**handle.shard({"input_ids": ids, "labels": ids})).loss.backward()
        assert all(p.grad is None for p in handle.parts.sight.tower.parameters())


def test_more_processes_look_at_an_image_that_stands_for_nothing() -> None:
    ids = torch.arange(1, 9)[None]
    with prepared() as handle:
        part = handle.vision.shard({"input_ids": ids, "labels": ids}, Mesh(world=Axis(2, 0, (0, 1))))
        assert part["image_grid_thw"].tolist() == [[1, 2, 2]]
        part[CONTEXT] = replace(part[CONTEXT], mesh=Mesh())
        handle.model(**part).loss.backward()
        gradients = [p.grad for p in handle.parts.sight.tower.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


def test_other_families_are_refused_by_name() -> None:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {"vocab_size": 44, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    config = Qwen2VLConfig(
        text_config=text, vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 2}
    )
    with pytest.raises(ModelError, match=r"has .*vision_config.* of multimodal models longspan divides Qwen2.5-VL and"):
        longspan.prepare(Qwen2VLForConditionalGeneration(config), 1)


def test_layers_that_deepstack_adds_to_keep_their_input() -> None:
    memory = Memory(4, (Keep.X_O, Keep.OUT, Keep.NONE, Keep.OUT))
    with prepared(memory=memory) as handle:
        assert handle.memory.keep == (Keep.X_O, Keep.X_O, Keep.X, Keep.OUT)
    with prepared("qwen2_5_vl", memory=memory) as handle:
        assert handle.memory == memory


@pytest.mark.parametrize(("name", "edited"), [("tiny-qwen3-vl", 1), ("tiny-qwen2.5-vl", 0)])
def test_shapes_for_planning(name: str, edited: int) -> None:
    model: Any = random_model(preset_config(name), torch.float32, torch.device("cpu"))
    shape = model_shape(name)
    assert (len(shape.layers), shape.edited, shape.layers[0].heads) == (2, edited, 4)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert sum(layer.parameters for layer in shape.layers) == sum(
        p.numel() for p in model.model.language_model.layers.parameters()
    )


@pytest.mark.parametrize("name", ["tiny-qwen3-vl", "tiny-qwen2.5-vl"])
def test_samples_of_a_check_have_images(name: str) -> None:
    """They fit the model's tokens, documents are told apart, and where a leak is looked for is text."""
    config = preset_config(name)
    model = random_model(config, torch.float32, torch.device("cpu"))
    sight = sight_of(model)
    assert sight is not None
    assert text_vocabulary(config) == 380
    with redirect_stderr(io.StringIO()):
        handle = longspan.prepare(model, 1)
    for packed in (False, True):
        for plain in samples(87, text_vocabulary(config), packed):
            sample = with_images(plain, sight)
            assert sample.images
            assert all(len(document) > 6 for document in sample.images)
            documents = len(sample.documents)
            starts = handle.shard(sample.batch)[CONTEXT].mask.documents
            assert sum(map(len, starts or ())) == (documents if "packed" in plain.name else 0)
            for document in sample.probed():
                batch, at = sample.changed(document, text_vocabulary(config))
                assert int(sample.batch["mm_token_type_ids"][document.row, at]) == 0
                handle.shard(batch)


def test_an_album_says_what_it_holds() -> None:
    """The tests' own batches: tokens of images and videos match their patches."""
    batch = GOOD.batch()
    assert int((IDS == IMAGE).sum()) * 4 == len(batch["pixel_values"])
    assert int((IDS == VIDEO).sum()) * 4 == len(batch["pixel_values_videos"])
    found: Tensor = batch["mm_token_type_ids"]
    assert found.unique().tolist() == [0, 1, 2]
