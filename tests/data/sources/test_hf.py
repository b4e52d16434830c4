"""Data sets of Hugging Face as samples; all are made here, none is fetched."""

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.making import encode, pixels
from tests.ranks import RankPool
from vqclip import dist
from vqclip.data import RawSample, open_sources, parse_source
from vqclip.data.sources import hf
from vqclip.data.sources.hf import HfConfig
from vqclip.errors import DataError, VqclipError

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'vqclip[hf]'")

IMAGES = [encode(pixels(number)) for number in range(10)]
CAPTIONS = [f"caption {number}" for number in range(10)]
EXPECTED = [RawSample(image, (caption,)) for image, caption in zip(IMAGES, CAPTIONS, strict=True)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def made(images: list[bytes] = IMAGES, **columns: object) -> object:
    features = {"image": datasets.Image(), "caption": datasets.Value("string")}
    features["label"] = datasets.ClassLabel(names=["a", "b"])
    columns = columns or {"caption": CAPTIONS}
    chosen = datasets.Features({name: features[name] for name in ("image", *columns)})
    values = {"image": [None if image is None else {"bytes": image, "path": None} for image in images], **columns}
    return datasets.Dataset.from_dict(values, features=chosen)


def read_all(path: Path | str, **options) -> list[RawSample]:
    source = HfConfig(path=str(path), **options).build()
    return [source.read(index) for index in range(len(source))]


def refusal(path: Path | str, **options) -> str:
    with pytest.raises(VqclipError) as error:
        read_all(path, **options)
    return str(error.value)


def test_splits(tmp_path: Path) -> None:
    both = {"train": made(), "test": made(IMAGES[:2], caption=CAPTIONS[:2])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "a")
    assert parse_source(tmp_path / "a", ["split=test"]).kind == "hf"
    assert read_all(tmp_path / "a", split="test") == EXPECTED[:2]
    assert "split: missing; expected one of those of" in refusal(tmp_path / "a")
    assert "split: got 'val'; expected one of those of" in refusal(tmp_path / "a", split="val")
    datasets.DatasetDict(train=both["train"]).save_to_disk(tmp_path / "b")
    assert read_all(tmp_path / "b") == EXPECTED


def test_labels_become_prompts(tmp_path: Path) -> None:
    made(label=[number % 2 for number in range(10)]).save_to_disk(tmp_path)
    source = parse_source(tmp_path).build()
    assert source.classnames == ("a", "b")
    assert source.read(3) == RawSample(IMAGES[3], ("a photo of a b",), 1)


def test_a_folder_of_load_dataset(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    made().to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    assert read_all(tmp_path, split="train") == EXPECTED
    assert read_all(tmp_path, split="train[2:4]") == EXPECTED[2:4]
    assert read_all(tmp_path) == EXPECTED


def prepare_and_open(folder: Path, cache: Path) -> tuple[int, str, list[RawSample], int]:
    """On a rank: calls of load_dataset, the identity and the samples of the source, and calls by the next run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VQCLIP_CACHE", str(cache))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache / "hf")
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        calls, load = [], datasets.load_dataset
        patch.setattr(datasets, "load_dataset", lambda *a, **k: (calls.append(a), load(*a, **k))[1])
        config = HfConfig(path=str(folder))
        (source,) = open_sources([config])
        first, samples = len(calls), [source.read(index) for index in range(len(source))]
        open_sources([config])
        return first, str(source.fingerprint), samples, len(calls)


def test_one_process_of_a_machine_asks_the_hub(tmp_path: Path, ranks: RankPool) -> None:
    made().to_parquet(tmp_path / "a" / "data.parquet")
    (first, *main, again), (others, *other, later) = ranks(2, prepare_and_open, tmp_path / "a", tmp_path / "cache")
    assert (first, again, others, later) == (1, 2, 0, 0)
    assert main == other
    assert main[1] == EXPECTED


@pytest.mark.parametrize("form", ["torch", "numpy", "arrow"])
def test_a_saved_format_changes_nothing(tmp_path: Path, form: str) -> None:
    data = made(caption=CAPTIONS, label=[0] * 10).with_format(form, columns=["label"])
    data.save_to_disk(tmp_path)
    source = HfConfig(path=str(tmp_path), label="label", classnames=("cat",)).build()
    assert source.read(3) == RawSample(IMAGES[3], (CAPTIONS[3],), 0)


@pytest.mark.parametrize("ends", [(0, 9, 18, 10**8), (0, 18, 9, 27), (0, 9, 18, 40)])
def test_values_outside_of_the_file_are_not_read(tmp_path: Path, ends: tuple[int, ...]) -> None:
    made().save_to_disk(tmp_path)  # of ten captions of nine characters
    (file,) = tmp_path.glob("*.arrow")
    data, true = file.read_bytes(), struct.pack("<4i", 0, 9, 18, 27)
    assert data.count(true) == 1
    file.write_bytes(data.replace(true, struct.pack("<4i", *ends)))
    with pytest.raises(DataError, match="cannot be read by datasets .ArrowInvalid: Column"):
        HfConfig(path=str(tmp_path)).build()


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{tmp_path}/none: no such folder, and no name of a data set on the hub" in refusal(tmp_path / "none")
    assert "cannot be read by datasets (" in refusal(tmp_path)
    assert "pandas: is a file format, not a data set" in refusal("pandas")
    assert "nobody/nothing: cannot be read by datasets (" in refusal("nobody/nothing")
    (tmp_path / "x.py").touch()
    assert "x.py: is a file; expected a folder" in refusal(tmp_path / "x.py")
    made().save_to_disk(tmp_path / "a")
    assert "captions: no column 'words'; its columns: 'image', 'caption'" in refusal(tmp_path / "a", captions="words")
    assert "leave them out" in refusal(tmp_path / "a", streaming=True)
    (file,) = (tmp_path / "a").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:3000])
    assert f"{tmp_path}/a: " in refusal(tmp_path / "a")
    file.unlink()
    assert f"{tmp_path}/a: cannot be read by datasets" in refusal(tmp_path / "a")
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    assert "datasets 3.6.0 is installed; expected 4 or later" in refusal(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'vqclip[hf]'" in refusal(tmp_path / "a")


def test_no_script_of_a_data_set_runs(tmp_path: Path) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    text = refusal(tmp_path)
    assert "cannot be read by datasets" in text
    assert text.endswith("set revision: refs/convert/parquet")
    assert not (tmp_path / "ran").exists()


CARD = """---
dataset_info:
  features:
  - {name: image, dtype: image}
  - {name: caption, dtype: string}
  splits:
  - {name: train, num_bytes: 1, num_examples: 10}
---
"""


def test_streams_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    made().to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text(CARD)
    config = HfConfig(path=str(tmp_path), split="train", streaming=True)
    source = config.build()
    assert [source.read(index) for index in (9, 0, 3)] == [EXPECTED[index] for index in (9, 0, 3)]
    with monkeypatch.context() as patch:
        patch.setattr(hf.HfStream, "read", lambda *_: pytest.fail("is packed"))
        assert config.build().fingerprint == source.fingerprint
    made(IMAGES[::-1]).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    assert config.build().read(0).image == IMAGES[9]
    (tmp_path / "README.md").unlink()
    assert len(config.build()) == 10  # no card, no number of rows


def test_a_data_set_at_the_hub_is_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    info = type("Info", (), {"sha": "a" * 40})
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda _, *a, **k: (asked.append((a, k)), info)[1])
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    configs = [HfConfig(path="someone/images", streaming=True, revision=each) for each in ("main", "b" * 40)]
    pinned = [config.model_copy(update=config.pins()) for config in configs]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: made())
    assert [config.find().identity["files"] for config in pinned] == ["a" * 40, "b" * 40]
    assert asked == [(("someone/images",), {"revision": "main"})]
    configs[0].model_copy(update={"path": str(tmp_path)}).pins()
    assert len(asked) == 1


class Unreachable(Exception):
    def __init__(self, status: int):
        super().__init__(f"HTTP {status}")
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize("streaming", [False, True])
def test_packed_rows_need_no_hub(tmp_path, streaming, monkeypatch, caplog):
    answers: list[object] = [SimpleNamespace(sha="a" * 40)]

    def ask(*_: object, **__: object) -> object:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    def load(*_: object, **__: object) -> object:
        ask()
        return stored.to_iterable_dataset() if streaming else stored

    made().to_parquet(tmp_path / "a.parquet")
    stored = datasets.Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", ask)
    monkeypatch.setattr(datasets, "load_dataset", load)
    options = {"path": "someone/images", "split": "train", "streaming": streaming}
    (source,) = open_sources([HfConfig(**options)])
    for status in (0, 429, 503):
        answers.append(Unreachable(status))
        caplog.clear()
        (again,) = open_sources([HfConfig(**options)])
        assert again.fingerprint == source.fingerprint
        (warning,) = [text for text in caplog.messages if "does not name its commit" in text]
        assert f"rows of commit {'a' * 40}, packed before, are used" in warning
    assert HfConfig(**options, revision="a" * 40).build().fingerprint == source.fingerprint
    with pytest.raises(DataError, match="cannot be read by datasets"):
        HfConfig(**options, revision="other").build()  # nothing is packed of this branch
    answers.append(Unreachable(404))
    with pytest.raises(DataError, match="HTTP 404"):
        open_sources([HfConfig(**options)])


def revision_on_rank(folder: Path) -> tuple[list[str], int]:
    """The revisions that this rank opens, and how often it asks for a commit; a branch moves whenever it is asked."""
    asked: list[int] = []

    def ask(*_: object, **__: object) -> SimpleNamespace:
        asked.append(dist.rank())
        return SimpleNamespace(sha=f"{dist.rank()}{len(asked)}" * 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VQCLIP_CACHE", str(folder / str(dist.rank())))
        patch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        patch.setattr("huggingface_hub.HfApi.dataset_info", ask)
        opened: list[str] = []
        stored = datasets.Dataset.from_parquet(str(folder / "a.parquet"), cache_dir=str(folder / f"hf{dist.rank()}"))
        patch.setattr(datasets, "load_dataset", lambda *_, **o: (opened.append(o["revision"]), stored)[1])
        (source,) = open_sources([HfConfig(path="someone/images", split="train")])
        assert len(source) == 10
        return opened, len(asked)


def test_all_ranks_read_the_commit_that_the_first_one_found(tmp_path: Path, ranks: RankPool) -> None:
    made().to_parquet(tmp_path / "a.parquet")
    results = ranks(2, revision_on_rank, tmp_path)
    assert results == [(["01" * 20], 1), (["01" * 20], 0)]
