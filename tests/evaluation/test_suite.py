from __future__ import annotations

import os
import time

import pytest
from pydantic import TypeAdapter, ValidationError
from torch import nn

from tests.evaluation.made import caption_shards, class_shards, tiny_clip
from vqclip import dist
from vqclip.errors import DataError, DistributedError
from vqclip.evaluation import (
    MODES,
    CaptionsData,
    ClassesData,
    Evaluations,
    RetrievalConfig,
    ZeroShotConfig,
    evaluate,
    load_ids,
    prepare,
)
from vqclip.model import CLIP

CAPTIONS = [[f"number {i} of them", f"picture {i}"][: 1 + i % 2] for i in range(9)]


@pytest.fixture
def folder(tmp_path):
    class_shards(tmp_path / "classes")
    caption_shards(tmp_path / "captions", CAPTIONS)
    tiny_clip().save_pretrained(tmp_path / "model")
    return tmp_path


def tasks(folder, batch_size=4, limit=None):
    captions = CaptionsData(path=str(folder / "captions"), captions="txt_lines")
    return [
        ZeroShotConfig(data=ClassesData(path=folder / "classes"), batch_size=batch_size, limit=limit),
        RetrievalConfig(data=captions, batch_size=batch_size, limit=limit),
    ]


def evaluate_on_rank(folder, distributed, who, limit=None):
    os.environ["VQCLIP_CACHE"] = str(folder / "cache")
    model = CLIP.from_pretrained(folder / "model").train()
    if dist.rank() not in who:
        return None
    found = evaluate(model, tasks(folder, limit=limit), distributed=distributed)
    return [result.to_json() for result in found]


@pytest.mark.parametrize("limit", [None, 1])  # with one sample a rank has none
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_find_what_one_finds(ranks, folder, world_size, limit):
    alone = evaluate(CLIP.from_pretrained(folder / "model"), tasks(folder, limit=limit))
    for found in ranks(world_size, evaluate_on_rank, folder, True, range(world_size), limit):
        for result, expected in zip(found, alone, strict=True):
            figures = result.pop("figures")
            for mode in MODES:
                assert figures[mode] == pytest.approx(expected.figures[mode])
            assert result == {name: value for name, value in expected.to_json().items() if name != "figures"}


def test_rank_0_alone_does_not_wait(ranks, folder):
    alone = [result.to_json() for result in evaluate(CLIP.from_pretrained(folder / "model"), tasks(folder))]
    start = time.monotonic()
    found, nothing = ranks(2, evaluate_on_rank, folder, False, (0,), timeout=60.0)
    assert time.monotonic() - start < 50
    assert nothing is None
    assert found == alone


def evaluate_wrapped(folder):
    os.environ["VQCLIP_CACHE"] = str(folder / "cache")
    wrapped = dist.wrap_ddp(CLIP.from_pretrained(folder / "model"))
    assert not isinstance(wrapped, CLIP)
    return [result.to_json() for result in evaluate(wrapped, tasks(folder), distributed=dist.rank() < 0)]


def test_a_wrapped_model_is_unwrapped(ranks, folder):
    first, second = ranks(2, evaluate_wrapped, folder)
    assert first == second


def evaluate_a_bad_sample(folder):
    os.environ["VQCLIP_CACHE"] = str(folder / "cache")
    model = CLIP.from_pretrained(folder / "model")
    try:
        evaluate(model, tasks(folder)[1:])
    except (DataError, DistributedError) as error:
        return type(error).__name__, str(error)


def test_an_error_on_one_rank_is_raised_on_all(ranks, folder):
    caption_shards(folder / "captions", [["fine"], [], ["fine too"]])
    first, second = ranks(2, evaluate_a_bad_sample, folder)
    assert (first[0], second[0]) == ("DistributedError", "DataError")
    for _, message in (first, second):
        assert "000000001: the caption (.txt) is empty" in message


def test_names_must_differ(folder):
    schema = TypeAdapter(Evaluations)
    zero_shot, retrieval = tasks(folder)
    same_name = retrieval.model_copy(update={"name": zero_shot.name})
    assert schema.validate_python((zero_shot, same_name)) == (zero_shot, same_name)
    with pytest.raises(ValidationError, match="two of kind 'zero_shot' named 'zero-shot'"):
        schema.validate_python((zero_shot, zero_shot))


def test_prepare_finds_what_evaluate_would(folder):
    prepare(tasks(folder))
    (folder / "classes" / "classnames.txt").unlink()
    with pytest.raises(DataError, match=r"classnames\.txt"):
        prepare(tasks(folder))


def test_codes_are_kept_where_asked(folder):
    model = tiny_clip()
    evaluate(model, tasks(folder), codes_folder=folder / "codes" / "here")
    names = sorted(path.name for path in (folder / "codes" / "here").iterdir())
    assert names == [f"{task}-{modality}-0.safetensors" for task in (0, 1) for modality in ("image", "text")]
    ids = load_ids(folder / "codes" / "here" / "1-text-0.safetensors", model.text.codebook_sizes)
    assert ids.shape == (sum(map(len, CAPTIONS)), 12, 1)


def test_batch_sizes_and_workers_change_nothing(folder):
    model = tiny_clip()
    one = evaluate(model, tasks(folder, batch_size=1))
    other = evaluate(model, [task.model_copy(update={"workers": 2}) for task in tasks(folder, batch_size=100)])
    for a, b in zip(one, other, strict=True):
        assert a.figures["codes_only"] == pytest.approx(b.figures["codes_only"])
        assert a.usage == b.usage


def test_each_image_passes_the_tower_once(folder):
    model = tiny_clip()
    seen = {"image": 0, "text": 0}
    for name in seen:
        tower: nn.Module = getattr(model, name).tower
        tower.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: seen[name] + len(inputs[0])}))
    evaluate(model, tasks(folder))
    assert seen == {"image": 22 + 9, "text": 8 + sum(map(len, CAPTIONS))}
