"""Training with teachers whose outputs are stored: the same bits, without running or keeping the teachers."""

import gc
import shutil
from pathlib import Path

import pytest
import torch

from tests.models import tiny_model
from tests.train.test_distillation import folders, pretrained, term  # noqa: F401 (fixtures)
from tests.train.test_feature_cache import cache_of, shards, tree_of  # noqa: F401 (fixture)
from tests.training import all_equal, before_steps, identity_of, run, timeless, weights
from vqclip.train import TrainConfig
from vqclip.train.distillation import FeatureTerm
from vqclip.train.teachers import EmbeddingTeacher

BOTH = ("image", "text")


def tree(folder, shards, terms, cache=None, frozen=BOTH, **changes):  # noqa: F811
    short = {"train__steps": 6, "train__checkpoint_every": 3}
    return tree_of(folder, shards, cache, frozen, **(short | changes)) | {"distillation": terms}


def train(folder, *args, **changes):
    """Train, and count the teachers that exist in the first step."""
    counted = []

    def count(step, batch, number):
        if not counted:
            gc.collect()
            every = gc.get_objects()
            counted.append(sum(issubclass(type(each), EmbeddingTeacher) for each in every))
            counted[0] += sum(type(each) is FeatureTerm and each.teacher is not None for each in every)

    with before_steps(count):
        run(tree(folder, *args, **changes), str(folder))
    return counted[0]


def assert_same_run(one: Path, other: Path):
    assert timeless(one) == timeless(other)
    assert all_equal(weights(one, 6), weights(other, 6))


def stored_folders(folder):
    return sorted(path.name for path in (folder / "features").iterdir())


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_embeddings_for_frozen_towers(tmp_path, shards, folders, micro_batches):  # noqa: F811
    terms, more = [term("embeddings", folders["wide"], until_step=4)], {"train__micro_batches": micro_batches}
    assert train(tmp_path / "plain", shards, terms, **more) == 1
    assert train(tmp_path / "stored", shards, terms, cache_of(tmp_path), **more) == 0
    assert_same_run(tmp_path / "plain", tmp_path / "stored")
    assert [name.partition("-")[0] for name in stored_folders(tmp_path)] == ["image"] * 2 + ["text"] * 2


@pytest.mark.slow
def test_features_for_towers_that_train(tmp_path, shards, folders):  # noqa: F811
    """A larger teacher for images; two terms with one teacher store it once."""
    terms = [
        term("image_features", folders["wide"]),
        term("image_features", folders["wide"], weight=0.1),
        term("text_features", folders["same"]),
        term("embeddings", folders["same"]),
    ]
    train(tmp_path / "plain", shards, terms, frozen=())
    assert train(tmp_path / "stored", shards, terms, cache_of(tmp_path), ()) == 0
    assert_same_run(tmp_path / "plain", tmp_path / "stored")
    assert [name.partition("-")[0] for name in stored_folders(tmp_path)] == ["image"] * 2 + ["text"] * 2


@pytest.mark.slow
def test_features_belong_to_the_teachers_weights_and_not_to_its_path(tmp_path, shards, folders):  # noqa: F811
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(folders["same"], moved)
    torch.manual_seed(77)
    tiny_model().build().save_pretrained(other)
    counts = []
    for number, folder in enumerate((folders["same"], moved, other)):
        for kind in ("embeddings", "text_features"):
            terms = [term(kind, str(folder))]
            run(tree(tmp_path / f"{kind}{number}", shards, terms, cache_of(tmp_path), ()), str(tmp_path))
        counts.append(len(stored_folders(tmp_path)))
    assert counts == [3, 3, 6]


def test_teachers_that_need_images_are_stored_or_refused(tmp_path, shards, folders):  # noqa: F811
    def config(**changes):
        return TrainConfig.model_validate(tree(tmp_path, shards, [term("embeddings", folders["same"])], **changes))

    with pytest.raises(ValueError, match=r"teachers: got false .*expected true, or modalities: \[text\]"):
        config(cache={"teachers": False})
    texts = {"teachers": False, "modalities": ["text"]}
    assert not config(cache=texts).stores_teacher(config().distillation[0])
    every = config(cache={"modalities": ["text"]}, data__views=None)
    assert not every.stores_teacher(every.distillation[0])
    with pytest.raises(ValueError, match="but these towers train"):
        config(cache={"teachers": False}, frozen=())


def test_rounded_outputs_of_teachers_belong_to_the_identity(tmp_path, shards, folders):  # noqa: F811
    def data(**cache):
        return identity_of(tree(tmp_path, shards, [term("embeddings", folders["same"])], cache))["data"]

    assert "feature_cache" not in data()
    assert data(dtype="bf16")["feature_cache"]["teachers"] == ["embeddings"]
