from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from vqclip.evaluation import CaptionedData, LabelledData


@pytest.mark.parametrize("path", [[], ""])
def test_nothing_to_read_is_refused(path):
    with pytest.raises(ValidationError, match="path: got nothing"):
        TypeAdapter(CaptionedData).validate_python({"kind": "shards", "path": path})


def test_json_needs_keys():
    with pytest.raises(ValidationError, match=r"(?s)shards.json_keys.*at least 1 item"):
        TypeAdapter(CaptionedData).validate_python(
            {"kind": "shards", "path": "val", "captions": "json", "json_keys": []}
        )


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        (LabelledData, {"kind": "classes", "path": "a"}),
        (LabelledData, {"kind": "scenes"}),
        (CaptionedData, {"kind": "shards", "path": "a"}),
        (CaptionedData, {"kind": "scenes"}),
    ],
)
def test_weights_are_for_training(schema, data):
    TypeAdapter(schema).validate_python(data)
    with pytest.raises(ValidationError, match="weight"):
        TypeAdapter(schema).validate_python({**data, "weight": 1.0})


@pytest.mark.parametrize(
    ("schema", "data"),
    [(LabelledData, {"split": "train"}), (LabelledData, {"split": "val"}), (CaptionedData, {"split": "test"})],
)
def test_splits_of_scenes(schema, data):
    with pytest.raises(ValidationError, match="split"):
        TypeAdapter(schema).validate_python({"kind": "scenes", **data})


def test_defaults_are_the_splits_of_evaluation():
    assert TypeAdapter(LabelledData).validate_python({"kind": "classes", "path": "a"}).split == "test"
    assert TypeAdapter(LabelledData).validate_python({"kind": "scenes"}).split == "test"
    assert TypeAdapter(CaptionedData).validate_python({"kind": "scenes"}).split == "val"
