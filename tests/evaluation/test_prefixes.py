"""Accuracy at every number of bits, from prefixes of the stored ids."""

import pytest

from tests.evaluation.made import class_shards
from tests.models import RESIDUAL, VQ, built
from vqclip.data import ClassShardsConfig
from vqclip.errors import ConfigError
from vqclip.evaluation import MODES, KnnConfig, Prefixes, ZeroShotConfig, evaluate
from vqclip.quantizers import Prefix

IMAGE = {"kind": "product", "layer": RESIDUAL, "codebooks": 2}


def model(image=IMAGE, text=VQ):
    return built(image, text)


@pytest.fixture
def task(tmp_path):
    class_shards(tmp_path / "classes")
    return ZeroShotConfig(name="colours", data=ClassShardsConfig(path=tmp_path / "classes"), batch_size=4)


def test_every_prefix_costs_and_finds_its_own_with_intervals(task):
    whole, calls = model(), []
    prefixes = Prefixes.of(whole)
    whole.image.tower.register_forward_hook(lambda *_: calls.append(1))
    (plain,) = evaluate(whole, [task])
    calls_without = len(calls)
    (found,) = evaluate(whole, [task], prefixes=prefixes)
    assert {mode: found.figures[mode] for mode in MODES} == plain.figures
    assert found.usage == plain.usage
    # 4 patches of 4 bits in each of 2 codebooks and 3 stages; the texts have all of their ids.
    image = prefixes.modes["image"]
    assert [*found.figures] == [*MODES, *image]
    assert [(*prefix, prefixes.bits(found, "image", mode)) for mode, prefix in image.items()] == [
        (1, 2, 32), (2, 2, 64), (3, 1, 48), (3, 2, 96)
    ]  # fmt: skip
    assert {prefixes.bits(found, "text", mode) for mode in image} == {found.usage["text"].bits_per_sample}
    assert found.figures["3 stages, 2 codebooks"] == plain.figures["codes_only"]
    assert set(found.intervals) == {*MODES, *image}
    for mode, intervals in found.intervals.items():
        assert intervals.keys() == found.figures[mode].keys()
        assert all(low <= found.figures[mode][name] <= high for name, (low, high) in intervals.items())
    assert len(calls) == 2 * calls_without > 0  # towers run once


def test_a_prefix_is_what_its_ids_alone_give(task):
    """The same figures as of a tokenizer whose ids are truncated when they are embedded."""
    whole = model(text=IMAGE)
    prefixes = Prefixes.of(whole, [Prefix(2, 1)], text="same")
    (found,) = evaluate(whole, [task], prefixes=prefixes)
    embed = {each: each.embed for each in (whole.image, whole.text)}
    for tokenizer, plain in embed.items():
        tokenizer.embed = lambda ids, precision, tokenizer=tokenizer, plain=plain: plain(tokenizer.truncate(ids, 2, 1))
    (cut,) = evaluate(whole, [task])
    mode = str(Prefix(2, 1))
    assert found.figures[mode] == cut.figures["codes_only"] != found.figures["codes_only"]
    assert prefixes.bits(found, "text", mode) == found.usage["text"].bits_per_sample / 3


def test_all_tasks_and_models_without_codes(task, tmp_path):
    train = ClassShardsConfig(path=class_shards(tmp_path / "train"), split="test")
    knn = KnnConfig(data=task.data, train=train, neighbours=1)
    for image, text, lengths in ((IMAGE, "identity", [0, 4]), ("identity", VQ, [0, 0]), (VQ, VQ, [1, 1])):
        sides = [{"kind": "identity", "dim": 4} if each == "identity" else each for each in (image, text)]
        whole = model(*sides)
        results = evaluate(whole, [task, knn], prefixes=Prefixes.of(whole))
        assert [len(each.figures) - len(MODES) for each in results] == lengths


def test_a_prefix_that_the_model_lacks_is_refused():
    with pytest.raises(ConfigError, match="codebooks: got 3, expected 1 to 2"):
        Prefixes.of(model(), [Prefix(1, 3)])
