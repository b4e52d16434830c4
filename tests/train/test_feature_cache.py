"""Training from stored features: the same bits, order, accounting and resume as with the towers in every step."""

import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.commands import command
from tests.data.making import caption_members, write_tar
from tests.models import BUSY_RESIDUAL
from tests.on_ray import small_ray
from tests.ranks import RankError
from tests.train.test_resume import start, wait_for
from tests.training import all_equal, identity_of, run, run_tree, timeless, weights
from vqclip.data.samples import read_decoded
from vqclip.data.work_folder import WorkFolder
from vqclip.errors import ConfigError, DataError, NonFiniteError, StorageError
from vqclip.io.atomic import ProcessLock
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.train import TrainConfig, feature_cache
from vqclip.train.step import TrainStep

COUNTS = (37, 30)
BAD = (5, 40)
"""Numbers of samples whose image is damaged."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards with two captions a sample, two damaged images and a sample without captions."""
    folder, first = tmp_path_factory.mktemp("shards"), 0
    for shard, count in enumerate(COUNTS):
        members = caption_members(first, count)
        for number in range(first, first + count):
            members[f"{number:09d}.txt"] = f"caption {number % 7}\nother {number}\n".encode()
            if number in BAD:
                members[f"{number:09d}.jpg"] = b"no image"
            if number == 11:
                members[f"{number:09d}.txt"] = b""
        write_tar(folder / f"{shard:05d}.tar", members)
        first += count
    return folder


def tree_of(folder, shards, cache, frozen=("image", "text"), **changes):
    """A run of 50 steps, more than five epochs, with frozen towers and two views of each image."""
    every = {"data__sources": [{"kind": "shards", "path": str(shards), "captions": "txt_lines"}], "data__views": 2}
    every |= {"data__max_bad_fraction": 0.9, "data__transform": {"scale": [0.3, 1.0], "flip": 0.5}}
    every |= {"data__feature_cache": cache, "train__steps": 50, "train__batch_size": 8, "train__precision": "fp32"}
    tree = run_tree(folder, shards, BUSY_RESIDUAL, **(every | changes))
    for name in frozen:
        tree["model"][name]["tower"]["train"] = "none"
    return tree


def bad_samples(folder):
    return (folder / "tiny" / "bad_samples.jsonl").read_text().splitlines()


def cache_of(folder, **changes):
    return {"folder": str(folder / "features"), **changes}


def train_plain(folder, shards, **changes):
    """Train without the cache on this rank; return the samples of each step."""
    return run(tree_of(folder / "plain", shards, None, **changes))["sample_ids"]


def train_stored(folder, shards, **changes):
    """Train with the cache on this rank; return the samples of each step, and how often a step decodes or computes."""
    step, tower, counted = TrainStep.__call__, ImageTokenizer.tower_features, []

    def stepping(self, batch, number):
        watched = mock.patch.object(ImageTokenizer, "tower_features", autospec=True, side_effect=tower)
        with mock.patch("vqclip.data.samples.read_decoded", wraps=read_decoded) as decoding, watched as running:
            result = step(self, batch, number)
        counted.append(decoding.call_count + running.call_count)
        return result

    with mock.patch.object(TrainStep, "__call__", stepping):
        stored = run(tree_of(folder / "stored", shards, cache_of(folder), **changes))
    return stored["sample_ids"], sum(counted)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_bits_over_fifty_steps(ranks, tmp_path, shards, processes):
    """Losses, weights, samples, and the records of bad samples."""
    without = ranks(processes, train_plain, tmp_path, shards, init=False)
    assert [len(plain) for plain in without] == [50] * processes
    assert ranks(processes, train_stored, tmp_path, shards, init=False) == [(plain, 0) for plain in without]
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    assert timeless(plain) == timeless(stored)
    assert all_equal(weights(plain, 50), weights(stored, 50))
    assert bad_samples(plain) == bad_samples(stored)
    kinds = {json.loads(line)["kind"] for line in bad_samples(plain)}
    assert len(kinds) == 2, kinds


@pytest.mark.parametrize("modality", ["image", pytest.param("text", marks=pytest.mark.slow)])
def test_one_modality_alone(tmp_path, shards, modality):
    changes = {"frozen": (modality,), "train__steps": 8, "train__micro_batches": 2}
    if modality == "text":
        changes |= {"data__views": None, "data__workers": 1}
    plain, (stored, _) = train_plain(tmp_path, shards, **changes), train_stored(tmp_path, shards, **changes)
    assert plain == stored
    assert timeless(tmp_path / "plain") == timeless(tmp_path / "stored")
    assert [path.name.partition("-")[0] for path in (tmp_path / "features").iterdir()] == [modality]


def shards_of(folder):
    return sorted((folder / "features").glob("*/*.safetensors"))


def test_each_view_is_seen_and_an_uncached_run_sees_the_same(tmp_path, shards):
    """Five epochs show two views of each image, evenly."""
    config = TrainConfig.model_validate(tree_of(tmp_path, shards, None))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    samples = config.data.build(16, lambda captions: (tokens.expand(len(captions), 3), [3]), 8, 0).samples
    seen = [samples.make(0, 3, epoch)[0].image for epoch in range(4)]
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])
    views = samples.make_views(3)
    assert torch.equal(views[1], seen[0])  # epoch + sample id
    assert torch.equal(views[0], seen[1])
    samples.views = None
    assert len({samples.make(0, 3, epoch)[0].image.numpy().tobytes() for epoch in range(4)}) == 4


SHORT = {"train__steps": 1, "optim__warmup_steps": 0}


@pytest.fixture(scope="module")
def stored(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("stored")
    run(tree_of(folder, shards, cache_of(folder), **SHORT), str(folder / "cache"))
    return folder / "features"


@pytest.fixture
def features(stored, tmp_path):
    """A copy of them, where `cache_of` looks."""
    return shutil.copytree(stored, tmp_path / "features")


def swap(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


DAMAGE = {
    "a bit flipped on the disk": lambda paths, records: paths[1].write_bytes(paths[1].read_bytes()[:-1] + b"\x01"),
    "missing": lambda paths, records: paths[1].unlink(),
    "two exchanged with their records": lambda paths, records: (swap(*paths[:2]), swap(*records[:2])),
}


def test_damaged_shards_are_computed_again(tmp_path, shards):
    """At once if a size, a time or a record shows it; otherwise after the run that read the damage has stopped."""
    tree = tree_of(tmp_path, shards, cache_of(tmp_path), train__steps=20)
    run(tree)
    paths = shards_of(tmp_path)
    records = [path.with_name("records") / f"{path.stem}.json" for path in paths]
    before = {path: path.read_bytes() for path in (*paths, *records)}
    assert len(paths) > 2
    for how, damage in DAMAGE.items():
        times = {path: path.stat().st_mtime_ns for path in paths}
        damage(paths, records)
        shutil.rmtree(tmp_path / "tiny")
        if how == "a bit flipped on the disk":
            os.utime(paths[1], ns=(times[paths[1]], times[paths[1]]))
            with pytest.raises(DataError, match=r"safetensors: the features of sample \d+ .*start the run again"):
                run(tree)
        run(tree)
        assert {path: path.read_bytes() for path in before} == before
        written = [path for path in paths if path.stat().st_mtime_ns != times[path]]
        assert written == (paths[:2] if how.startswith("two") else paths[1:2]), how


@pytest.mark.slow
def test_a_killed_job_keeps_its_shards_and_resumes_exactly(tmp_path, shards):
    """Killed while features are computed, and again in training."""
    tree = tree_of(tmp_path, shards, cache_of(tmp_path), train__checkpoint_every=5, data__workers=1)
    process = start(tree)
    wait_for(lambda: len(list((tmp_path / "features").glob("*/records/*.json"))) >= 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.join(30)
    kept = {path: path.stat().st_mtime_ns for path in shards_of(tmp_path)}
    process = start(tree)
    wait_for((tmp_path / "tiny" / "checkpoints" / "step-00000010").exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.join(30)
    run(tree)
    finished = [path for path in kept if path.with_name("records").joinpath(f"{path.stem}.json").exists()]
    assert finished
    assert sum(path.stat().st_mtime_ns == kept[path] for path in finished) >= 2
    run(tree_of(tmp_path / "whole", shards, cache_of(tmp_path), train__checkpoint_every=5))
    assert all_equal(weights(tmp_path, 50), weights(tmp_path / "whole", 50))


def test_features_are_stored_after_a_reduction_without_weights(tmp_path, shards, features, caplog):
    """The same bits, a quarter of the size; features from before the reduction have another folder, which is named."""
    changes = {"model__image__reduce": {"kind": "mean"}, "model__text__reduce": {"kind": "mean"}, "train__steps": 12}
    with caplog.at_level("INFO"):
        assert train_plain(tmp_path, shards, **changes) == train_stored(tmp_path, shards, **changes)[0]
    assert timeless(tmp_path / "plain") == timeless(tmp_path / "stored")
    assert "67 samples x 2 views x 1 token x 16 features, fp32: 8.58 kB" in caplog.text
    assert re.search(r"image-\w+ cannot be used, .*\n +origin.reduce.kind: absent there, 'mean' now\n", caplog.text)
    folders = (tmp_path / "features").glob("image-*")
    small, large = sorted(sum(path.stat().st_size for path in each.glob("*.safetensors")) for each in folders)
    assert small < large / 2


CHANGES = {
    "weights": {"run__seed": 1},
    "transform": {"data__transform": {"scale": [0.4, 1.0]}},
    "views": {"data__views": 3},
    "dtype": {"data__feature_cache__dtype": "bf16"},
    "precision": {"train__precision": "bf16"},
    "pixels": {"data__max_pixels": 10_000},
    "kind of CPU": {},  # kernels for other vector instructions round differently
    "version of ftfy": {},  # which decides the token numbers of captions
}


def test_other_settings_have_another_folder(tmp_path, shards, features, monkeypatch):
    """Only the features that they change."""
    version = importlib.metadata.version
    found = {"none": {path.name for path in features.iterdir()}}
    for name, changes in CHANGES.items():
        if name == "kind of CPU":
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX1024")
        if name == "version of ftfy":
            monkeypatch.setattr("importlib.metadata.version", lambda each: "0" if each == "ftfy" else version(each))
        run(tree_of(tmp_path / name, shards, cache_of(tmp_path), **SHORT, **changes))
        found[name] = {path.name for path in features.iterdir()}
    for name, (before, after) in zip(CHANGES, itertools.pairwise(found.values()), strict=True):
        changed = ["image"] if name in ("transform", "views", "pixels") else ["image", "text"]
        assert sorted(new.partition("-")[0] for new in after - before) == changed, name


def test_data_are_part_of_the_settings(tmp_path, shards, features):
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    run(tree_of(tmp_path / "b", other, cache_of(tmp_path), **SHORT))
    assert len(list(features.iterdir())) == 2  # the same bytes under other names
    write_tar(other / "00001.tar", caption_members(100, COUNTS[1]))
    source = {"kind": "shards", "path": str(other), "captions": "txt"}
    run(tree_of(tmp_path / "c", other, cache_of(tmp_path), **SHORT, data__sources=[source]))
    assert len(list(features.iterdir())) == 4


def test_half_precision_rounds_features_once(tmp_path, shards):
    dtype = "bf16"
    run(tree_of(tmp_path / "plain", shards, None, **SHORT))
    run(tree_of(tmp_path / "half", shards, cache_of(tmp_path, dtype=dtype), **SHORT))
    exact, half = (timeless(tmp_path / name)[0]["loss/total"] for name in ("plain", "half"))
    assert exact != half
    assert half == pytest.approx(exact, rel=0.05)
    sizes = [path.stat().st_size for path in shards_of(tmp_path)]
    assert max(sizes) < 64 * 4 * 16 * 4
    identity = identity_of(tree_of(tmp_path, shards, cache_of(tmp_path, dtype=dtype)))
    assert identity["data"]["feature_cache"]["dtype"] == dtype


def poisoned(tokenizer, value):
    """Features of which the third row is `value`."""
    compute = tokenizer.tower_features

    def compute_poisoned(self, inputs):
        features = compute(self, inputs)
        features[2, 0, 0] = value
        return features

    return mock.patch.object(tokenizer, "tower_features", compute_poisoned)


def test_features_that_cannot_be_stored_name_the_sample(tmp_path, shards):
    named = pytest.raises(NonFiniteError, match=r"00000\.tar: sample 000000001: the image")
    with poisoned(ImageTokenizer, float("nan")), named:
        run(tree_of(tmp_path / "a", shards, cache_of(tmp_path), **SHORT))
    tree = tree_of(tmp_path / "b", shards, cache_of(tmp_path, dtype="fp16", modalities=["text"]), **SHORT)
    named = pytest.raises(ConfigError, match=r"data\.feature_cache\.dtype: got fp16.*bf16 or fp32")
    with poisoned(TextTokenizer, 1e5), named:
        run(tree)


def test_settings_that_do_not_fit_are_refused(tmp_path, shards):
    def problem(cache, **changes):
        with pytest.raises(ValueError, match=r"data\.") as error:
            TrainConfig.model_validate(tree_of(tmp_path, shards, cache, **changes))
        return str(error.value)

    assert "model.image.tower.train: none" in problem({"modalities": ["image"]}, frozen=("text",))
    assert "expected model.image.tower.train: none or model.text.tower.train: none" in problem({}, frozen=())
    assert "at least 1 item" in problem({"modalities": []})
    assert "data.views: got null" in problem({}, data__views=None)
    assert "towers train" in problem({}, frozen=(), model__image__tower__train={"from_step": 10})


def test_a_full_disk_is_reported_before_any_work(tmp_path, shards, caplog):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with (
        mock.patch("shutil.disk_usage", return_value=usage),
        mock.patch("vqclip.train.main.require_space", return_value=None),  # which would refuse it for a checkpoint
        caplog.at_level("INFO"),
        pytest.raises(DataError, match=r"has room for 1 kB, and about 34.3 kB are needed; set .*feature_cache.folder"),
    ):
        run(tree_of(tmp_path, shards, cache_of(tmp_path), **SHORT))
    assert "67 samples x 2 views x 4 tokens x 16 features, fp32: 34.3 kB" in caplog.text
    assert not shards_of(tmp_path)


def test_a_finished_folder_is_only_read(tmp_path, shards, features):
    """So it may be on a read-only file system."""
    for lock in features.glob("*/lock"):
        lock.unlink()

    def state():
        return {path: path.stat().st_mtime_ns for path in features.rglob("*")}

    before = state()
    run(tree_of(tmp_path, shards, cache_of(tmp_path), **SHORT))
    assert state() == before


def test_a_rank_that_sees_no_shards_says_so(ranks, tmp_path, shards):
    tree = tree_of(tmp_path, shards, None, **SHORT)
    with pytest.raises(RankError, match=r"rank 1 does not see .*00000\.safetensors.*all machines share"):
        ranks(2, run_on_own_folder, tree, tmp_path, init=False)


def run_on_own_folder(tree, folder):
    rank = os.environ["RANK"]
    tree["data"]["feature_cache"] = {"folder": str(folder / rank)}
    missing = mock.patch.object(feature_cache, "_find_missing", lambda folder, shards: list(shards))
    with missing, mock.patch.object(feature_cache, "VISIBLE_S", 0.0):
        run(tree)


def test_files_that_are_hidden_for_a_while_are_waited_for(tmp_path, shards, monkeypatch):
    """As by the cache of a network file system, which remembers that a file was missing."""
    record, hidden = WorkFolder.record, [True, True]
    monkeypatch.setattr(feature_cache, "_POLL_S", 0.01)
    monkeypatch.setattr(feature_cache, "_find_missing", lambda folder, shards: list(shards))
    monkeypatch.setattr(WorkFolder, "record", lambda *args: None if hidden and hidden.pop() else record(*args))
    run(tree_of(tmp_path, shards, cache_of(tmp_path), **SHORT))
    assert not hidden


def test_two_jobs_compute_one_after_the_other(tmp_path, shards, features, caplog, monkeypatch):
    """The second waits for the lock of the first, and then finds its shards."""
    tree = tree_of(tmp_path, shards, cache_of(tmp_path), **SHORT)
    shards_of(tmp_path)[0].unlink()
    monkeypatch.setattr(feature_cache, "_POLL_S", 0.01)
    acquire, held = ProcessLock.try_acquire, ["process 7 on elsewhere"]

    def acquire_at_second_try(self):
        return held.pop() if held and "features" in str(self._path) else acquire(self)

    with mock.patch.object(ProcessLock, "try_acquire", acquire_at_second_try), caplog.at_level("INFO"):
        run(tree)
    assert "waiting for another job (process 7 on elsewhere)" in caplog.text


def test_storage_that_fails_is_not_stored_as_bad_samples(tmp_path, shards):
    failing = mock.Mock(side_effect=StorageError("no answer", "unreadable shard"))
    tree = tree_of(tmp_path, shards, cache_of(tmp_path), **SHORT)
    with mock.patch("vqclip.data.samples.read_decoded", failing), pytest.raises(DataError, match="no answer"):
        run(tree)
    assert not shards_of(tmp_path)


def test_shards_that_vanish_in_use_stop_the_run(tmp_path, shards, features):
    tree = tree_of(tmp_path, shards, cache_of(tmp_path), **SHORT)

    def deleting(self, readers):
        for path in shards_of(tmp_path):
            path.unlink()
        self.samples.features = readers

    told = "was changed or deleted; start the run again"
    with mock.patch("vqclip.data.loader.TrainData.use_features", deleting), pytest.raises(DataError, match=told):
        run(tree)


def find_and_count():
    seen = []
    work = SimpleNamespace(record=lambda shard: seen.append(shard) or shard % 3 or None)
    return feature_cache._find_missing(SimpleNamespace(work=work), range(8)), seen


def test_each_rank_verifies_a_part_of_the_shards(ranks):
    assert ranks(2, find_and_count) == [([0, 3, 6], [0, 2, 4, 6]), ([0, 3, 6], [1, 3, 5, 7])]


# ---- Caches that are filled before the run starts.


main = command("data")
ray = pytest.fixture(scope="module")(small_ray)


@pytest.fixture
def given(tmp_path, shards):
    """Arguments of the command, for a run that trains with the cache too."""
    tree = tree_of(tmp_path, shards, cache_of(tmp_path), data__workers=0, run__device="cpu", train__steps=6)
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    return ["features", "--config", str(tmp_path / "config.yaml")], tree


def bytes_of(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def train_without_computing(tree):
    with mock.patch.object(feature_cache.FeatureJob, "run", side_effect=AssertionError("features are missing")):
        run(tree)


def test_a_run_finds_the_features(tmp_path, given):
    arguments, tree = given
    assert main(arguments) == 0
    assert not (tmp_path / "tiny").exists()  # no run was made
    train_without_computing(tree)


def test_a_run_without_a_cache_is_refused(given, refused):
    arguments, _ = given
    assert "data.feature_cache: got null; expected a cache" in refused(main([*arguments, "data.feature_cache=null"]))
    assert "expected --engine ray" in refused(main([*arguments, "--ray-actors", "2"]))


@pytest.mark.slow
def test_ray_computes_the_same_bytes(tmp_path, given, ray, capfd):
    arguments, tree = given
    arguments += ["--engine", "ray", "--ray-actors", "2"]
    assert main(arguments) == 0
    assert "shards: 10 written, 0 already finished" in capfd.readouterr().out
    train_without_computing(tree)
    made = bytes_of(tmp_path / "features")
    (tmp_path / "features").rename(tmp_path / "elsewhere")
    assert main(arguments[:3]) == 0
    assert bytes_of(tmp_path / "features") == made
    victim = next((tmp_path / "features").glob("*/records/00003.json"))
    victim.unlink()
    assert main(arguments) == 0
    shown = capfd.readouterr()
    assert "shards: 1 written, 9 already finished" in shown.out
    assert "Traceback" not in shown.err
    assert bytes_of(tmp_path / "features") == made


@pytest.mark.slow
def test_mistakes_of_workers_end_in_one_line(tmp_path, given, ray, capfd):
    arguments = given[0] + ["--engine", "ray", "--ray-actors", "2"]
    assert main([*arguments, "data.sources[0].path=/nowhere/0.tar"]) == 1
    shown = capfd.readouterr().err
    assert "/nowhere/0.tar" in shown
    assert "Traceback" not in shown
