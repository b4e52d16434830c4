"""Kinds of other packages, installed as a package is: a module and the entry points of its dist-info folder."""

import sys
from pathlib import Path

import pytest

from tests.data.loading import SIZE, G, tokenize
from tests.data.making import encode, make_files, pixels
from vqclip.config import Config, load_config, to_yaml
from vqclip.data import DataConfig, parse_source
from vqclip.errors import ConfigError

MODULE = '''
from pathlib import Path
from typing import Literal

from vqclip.data import RawSample, SourceConfigBase


class NumbersConfig(SourceConfigBase):
    """Images that are named by a number."""

    kind: Literal["numbers"] = "numbers"
    """Numbered images."""
    path: Path
    """The folder."""

    def build(self):
        return Numbers(sorted(self.path.glob("*.jpg")))


class NothingConfig(SourceConfigBase):
    """Without build."""

    kind: Literal["mine"] = "mine"


class Numbers(list):
    classnames = templates = ()
    fingerprint = {"kind": "numbers"}

    def name(self, index):
        return str(self[index])

    def read(self, index):
        return RawSample(self[index].read_bytes(), (f"number {self[index].stem}",))
'''


def install(folder: Path, points: str) -> None:
    info = "numbers_source-1.0.dist-info"
    make_files(folder, "numbers_source.py", MODULE.encode())
    make_files(folder, f"{info}/METADATA", b"Metadata-Version: 2.1\nName: numbers-source\nVersion: 1.0\n")
    make_files(folder, f"{info}/entry_points.txt", f"[vqclip.sources]\n{points}\n".encode())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "numbers_source", raising=False)
    return folder


def test_a_kind_of_another_package(site: Path, tmp_path: Path) -> None:
    install(site, "numbers = numbers_source:NumbersConfig\nbroken = missing_module:Config")
    for number in range(G):
        (tmp_path / f"{number}.jpg").write_bytes(encode(pixels(number)))

    class Tree(Config):
        data: DataConfig

    with pytest.raises(ConfigError, match="one of shards, .*; from installed packages: broken, numbers; did you mean"):
        load_config(Tree, None, [f"data.sources=[{{kind: number, path: {tmp_path}}}]"])
    assert "numbers_source" not in sys.modules  # only what is named is imported
    numbers = f"data.sources=[{{kind: numbers, path: {tmp_path}, weight: 2.0}}]"
    tree = load_config(Tree, None, [numbers, "data.workers=1"])
    (batch,) = tree.data.build(size=SIZE, tokenize=tokenize, batch_size=G, seed=0).batches(0, 1)
    assert all(caption.startswith("number ") for caption in batch.captions)
    (tmp_path / "tree.yaml").write_text(to_yaml(tree))
    assert load_config(Tree, tmp_path / "tree.yaml") == tree
    assert len(parse_source(tmp_path, ["kind=numbers"]).build()) == G
    with pytest.raises(ConfigError, match=r"kind numbers: paths: unknown key; did you mean .path.\?$"):
        load_config(Tree, None, [f"data.sources=[{{kind: numbers, path: {tmp_path}, paths: x}}]"])


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("mine = missing_module:Config", "missing_module:Config of numbers-source cannot be imported: ModuleNotFound"),
        ("mine = leaves_source:Config", "cannot be imported: SystemExit: "),
        ("mine = numbers_source:Numbers", "is not a subclass of vqclip.data.SourceConfigBase"),
        ("mine = numbers_source:NumbersConfig", r'with kind: Literal\["mine"\] = "mine" and a method build'),
        ("mine = numbers_source:NothingConfig", r"and a method build\(\)"),
    ],
)
def test_a_package_that_does_not_fit(site: Path, tmp_path: Path, points: str, message: str) -> None:
    install(site, points)
    (site / "leaves_source.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match=message):
        parse_source(tmp_path, ["kind=mine"])
