"""Messages of a source that cannot be used name its key path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.loading import tokenize
from tests.data.making import caption_shards
from vqclip.config import load_config
from vqclip.data import DataConfig
from vqclip.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "torchvision", "name": "CIFAR"}, ".name: got 'CIFAR'; expected a data set of torchvision: "),
        ({"kind": "torchvision", "name": "CIFAR10"}, ".pickles: false; the files of CIFAR10 are Python pickles"),
        ({"kind": "torchvision", "name": "FakeData", "arguments": {"sise": 1}}, ".arguments: FakeData takes no 'sise'"),
        ({"kind": "torchvision", "name": "MNIST", "root": "{}"}, ".root: got "),
        ({"kind": "shards", "path": "{}/none"}, ": {}/none: no such file or folder"),
        ({"kind": "csv", "path": "{}/a.csv"}, ": {}/a.csv: image: no column has a usual name"),
        ({"kind": "csv", "path": "s3://bucket/a.csv"}, ".path: got s3://bucket/a.csv; kind: csv reads files on this"),
        ({"kind": "folder", "path": "{}/none"}, ": {}/none: no such folder"),
        ({"kind": "coco", "path": "{}/none.json"}, ": {}/none.json: cannot be read"),
        ({"kind": "parquet", "path": "{}/none.parquet"}, ": {}/none.parquet: no such file or folder"),
        ({"kind": "classes", "path": "{}"}, ": {}: has no split 'train'"),
        ({"kind": "hf", "path": "{}/none"}, ": "),
    ],
)
def test_errors_name_the_key_path(tmp_path: Path, source: dict, message: str) -> None:
    whole = caption_shards(tmp_path / "shards", (3,))
    (tmp_path / "a.csv").write_text("a,b\nc,d\n")
    filled = {key: value.replace("{}", str(tmp_path)) if key != "arguments" else value for key, value in source.items()}
    config = load_config(DataConfig, {"sources": [{"kind": "shards", "path": str(whole)}, filled], "workers": 0})
    with pytest.raises((ConfigError, DataError)) as error:
        config.build(8, tokenize, 2, 0)
    assert str(error.value).startswith("data.sources[1]" + message.replace("{}", str(tmp_path)))
