"""Accuracy at every number of bits, from prefixes of the stored ids."""

import pytest
import torch

from tests.evaluation.made import class_shards
from tests.models import VQ, tiny_model
from vqclip.data import ClassShardsConfig
from vqclip.errors import ConfigError
from vqclip.evaluation import MODES, DetailsConfig, KnnConfig, Prefixes, ZeroShotConfig, evaluate
from vqclip.quantizers import Prefix

RESIDUAL = {"kind": "residual", "layer": VQ, "depth": 3}
IMAGE = {"kind": "product", "layer": RESIDUAL, "codebooks": 2}


def model(image=IMAGE, text=VQ):
    torch.manual_seed(0)
    return tiny_model(image, text).build()


@pytest.fixture
def task(tmp_path):
    class_shards(tmp_path / "classes")
    return ZeroShotConfig(name="colours", data=ClassShardsConfig(path=tmp_path / "classes"), batch_size=4)


def test_every_prefix_costs_and_finds_its_own(task):
    whole = model()
    (plain,) = evaluate(whole, [task])
    (found,) = evaluate(whole, [task], prefixes=Prefixes.of(whole))
    assert found.figures == plain.figures
    assert found.usage == plain.usage
    assert plain.prefixes == []
    # 4 patches of 4 bits in each of 2 codebooks and 3 stages; the texts have all of their ids.
    assert [(each.stages, each.codebooks, each.bits_per_image) for each in found.prefixes] == [
        (1, 2, 32), (2, 2, 64), (3, 1, 48), (3, 2, 96)
    ]  # fmt: skip
    assert {each.bits_per_text for each in found.prefixes} == {found.usage["text"].bits_per_sample}
    assert found.prefixes[-1].figures == plain.figures["codes_only"]


def test_a_prefix_is_what_its_ids_alone_give(task):
    """The same figures as of a tokenizer whose ids are truncated when they are embedded."""
    whole = model(text=IMAGE)
    (found,) = evaluate(whole, [task], prefixes=Prefixes.of(whole, [Prefix(2, 1)], text="same"))
    embed = {each: each.embed for each in (whole.image, whole.text)}
    for tokenizer, plain in embed.items():
        tokenizer.embed = lambda ids, precision, tokenizer=tokenizer, plain=plain: plain(tokenizer.truncate(ids, 2, 1))
    (cut,) = evaluate(whole, [task])
    assert found.prefixes[0].figures == cut.figures["codes_only"] != found.figures["codes_only"]
    assert found.prefixes[0].intervals == {}
    assert found.prefixes[0].bits_per_text == found.usage["text"].bits_per_sample / 3


def test_intervals_beside_details(task):
    whole = model()
    (found,) = evaluate(whole, [task], prefixes=Prefixes.of(whole), details=DetailsConfig(hits=0, misses=0))
    assert set(found.details.intervals) == set(MODES)
    for each in found.prefixes:
        assert each.intervals.keys() == each.figures.keys()
        assert all(low <= each.figures[name] <= high for name, (low, high) in each.intervals.items())


def test_towers_run_once(task):
    whole, calls = model(), []
    whole.image.tower.register_forward_hook(lambda *_: calls.append(1))
    evaluate(whole, [task])
    plain = len(calls)
    evaluate(whole, [task], prefixes=Prefixes.of(whole))
    assert len(calls) == 2 * plain > 0


def test_all_tasks_and_models_without_codes(task, tmp_path):
    knn = KnnConfig(
        data=task.data, train=ClassShardsConfig(path=class_shards(tmp_path / "train"), split="test"), neighbours=1
    )
    for image, text, lengths in ((IMAGE, "identity", [0, 4]), ("identity", VQ, [0, 0]), (VQ, VQ, [1, 1])):
        sides = [{"kind": "identity", "dim": 4} if each == "identity" else each for each in (image, text)]
        whole = model(*sides)
        assert [len(each.prefixes) for each in evaluate(whole, [task, knn], prefixes=Prefixes.of(whole))] == lengths


def test_a_prefix_that_the_model_lacks_is_refused():
    with pytest.raises(ConfigError, match="codebooks: got 3, expected 1 to 2"):
        Prefixes.of(model(), [Prefix(1, 3)])
