"""Compositional sets in the layouts of SugarCrepe and Winoground."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.metrics import image_caption_selection
from pydantic import ValidationError

from tests.evaluation.made import PlainModel, png
from tests.evaluation.test_clip_benchmark import Rows
from vqclip.errors import DataError
from vqclip.evaluation import DetailsConfig, SugarCrepeConfig, WinogroundConfig, evaluate
from vqclip.evaluation.choices import all_before
from vqclip.evaluation.intervals import wilson
from vqclip.evaluation.winoground import winoground_scores


def sugarcrepe(folder, items):
    """Items of (image's number, right number, wrong number) by category."""
    (folder / "images").mkdir(parents=True)
    (folder / "sets").mkdir()
    for category, rows in items.items():
        body = {}
        for place, (image, right, wrong) in enumerate(rows):
            (folder / "images" / f"{image}.png").write_bytes(png(image))
            body[str(3 * place)] = {
                "filename": f"{image}.png",
                "caption": f"a {right}",
                "negative_caption": f"a {wrong}",
            }
        (folder / "sets" / f"{category}.json").write_text(json.dumps(body))
    return {"path": folder / "sets", "images": folder / "images"}


def winoground(folder, rows, parquet=False):
    """Rows of the numbers of image 0, image 1, caption 0 and caption 1."""
    (folder / "images").mkdir(parents=True)
    table = []
    for place, (first, second, *captions) in enumerate(rows):
        for side, number in enumerate((first, second)):
            (folder / "images" / f"ex_{place}_img_{side}.png").write_bytes(png(number))
        names = {f"image_{side}": f"ex_{place}_img_{side}" for side in (0, 1)}
        table.append({"id": place, **names, "caption_0": str(captions[0]), "caption_1": str(captions[1])})
    if parquet:
        for row in table:
            row |= {n: {"bytes": (folder / "images" / f"{row[n]}.png").read_bytes(), "path": None} for n in names}
        path = folder / "test.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path, row_group_size=2)
    else:
        path = folder / "examples.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
    return path


def test_all_before_equals_the_mean_over_all_orders_of_ties():
    for values in itertools.product((0, 1, 2), repeat=4):
        right, wrong = values[:2], values[2:]
        orders = [
            order
            for order in itertools.permutations(range(4))
            if all(values[a] >= values[b] for a, b in itertools.pairwise(order))
        ]
        expected = Fraction(sum({*order[:2]} == {0, 1} for order in orders), len(orders))
        found = all_before(torch.tensor([right]).float(), torch.tensor([wrong]).float())
        assert found.item() == pytest.approx(float(expected)), values


def test_scores_equal_clip_benchmarks():
    generator = torch.Generator().manual_seed(0)
    images = F.normalize(torch.randn(120, 4, generator=generator), dim=-1)
    captions = F.normalize(images + 0.8 * torch.randn(120, 4, generator=generator), dim=-1)
    model = Rows(images, captions)
    model.encode_image = lambda pixels: images[pixels[:, 0, 0, 0]]
    pairs = [(torch.arange(120).reshape(60, 2, 1, 1, 1), torch.arange(120).reshape(60, 2).tolist())]
    expected = image_caption_selection.evaluate(model, pairs, torch.tensor, "cpu", amp=False)
    scores = images.reshape(60, 2, 4) @ captions.reshape(60, 2, 4).mT
    found = winoground_scores(scores)
    assert list(found.values()) == pytest.approx([expected[name] for name in ("text_acc", "image_acc", "acc")])
    assert found["group_score"] < found["text_score"] != found["image_score"]
    single = [(torch.arange(0, 120, 2).reshape(60, 1, 1, 1), torch.arange(120).reshape(60, 2).tolist())]
    expected = image_caption_selection.evaluate(model, single, torch.tensor, "cpu", amp=False)
    assert float(all_before(scores[:, 0, :1], scores[:, 0, 1:]).mean()) == pytest.approx(expected["text_acc"])


def test_sugarcrepe_by_category_and_their_mean(tmp_path):
    items = {"add_att": [(1, 1, 2), (2, 2, 3), (3, 3, 1), (1, 9, 1)], "swap_obj": [(4, 4, 5), (5, 7, 8)]}
    data = sugarcrepe(tmp_path, items)
    (result,) = evaluate(PlainModel(12), [SugarCrepeConfig(data=data)], details=DetailsConfig())
    for name, (low, high) in result.details.intervals["codes_only"].items():
        assert 0 <= low < result.figures["codes_only"][name] < high <= 1
    assert result.details.intervals["codes_only"]["swap_obj"] == wilson(0.75, 2)
    expected = {"accuracy": 0.75, "add_att": 0.75, "swap_obj": 0.75}  # the last is a tie of two wrong ones
    assert result.figures["codes_only"] == expected
    assert result.figures["continuous"] == result.chance == dict.fromkeys(expected, 0.5)
    assert (result.samples, result.captions) == (5, 8)  # each image and caption once
    (one,) = evaluate(PlainModel(12), [SugarCrepeConfig(data=data | {"path": tmp_path / "sets" / "add_att.json"})])
    assert one.figures["codes_only"] == {"accuracy": 0.75, "add_att": 0.75}


@pytest.mark.parametrize("parquet", [False, True])
def test_winoground_in_both_layouts(tmp_path, parquet):
    rows = [(1, 2, 1, 2), (3, 4, 4, 3), (5, 6, 5, 5), (7, 8, 7, 8)]
    path = winoground(tmp_path, rows, parquet)
    (result,) = evaluate(PlainModel(12), [WinogroundConfig(data={"path": path}, workers=1)], details=DetailsConfig())
    figures = result.figures["codes_only"]
    assert result.details.intervals["codes_only"] == {name: wilson(rate, 4) for name, rate in figures.items()}
    # Row 3: image 5 is as near to both captions, and image 6 too; caption 1 is nearer to image 5.
    assert figures["text_score"] == pytest.approx((1 + 0 + 0.25 + 1) / 4)
    assert figures["image_score"] == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert figures["group_score"] == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert result.figures["continuous"] == pytest.approx(result.chance)
    assert result.chance["group_score"] == pytest.approx(1 / 6)


def test_choices_without_an_image_are_left_out(tmp_path):
    path = winoground(tmp_path, [(1, 2, 1, 2), (3, 4, 4, 3)])
    (tmp_path / "images" / "ex_1_img_0.png").write_bytes(b"no image")
    config = WinogroundConfig(data={"path": path}, max_bad_fraction=0.5)
    (result,) = evaluate(PlainModel(12), [config])
    assert result.figures["codes_only"]["group_score"] == 1.0
    assert "1 of 2 choices lack an image: left out" in result.notes
    (tmp_path / "images" / "ex_0_img_0.png").unlink()
    with pytest.raises(DataError, match=r"no choice has all of its images"):
        evaluate(PlainModel(12), [config.model_copy(update={"max_bad_fraction": 0.9})])


ITEM = {"filename": "1.png", "caption": "1", "negative_caption": "2"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", None, "a.json: cannot be read"),
        ("a.json", "{", "a.json: is not JSON: "),
        ("a.json", "[" * 10**5, "a.json: is not JSON"),
        ("a.json", "[]", "a.json: .*expected an object of objects"),
        ("a.json", json.dumps({"7": {"filename": "1.png", "caption": "1"}}), "a.json: 7.negative_caption"),
        ("a.json", "{}", "a.json: got 0 items"),
        ("accuracy.json", json.dumps({"0": ITEM}), "of another name"),
        ("a.json", json.dumps({"0": {**ITEM, "filename": "../secret.png"}}), "'../secret.png'; expected a path below"),
        ("a.json", json.dumps({"0": {**ITEM, "filename": "/etc/passwd"}}), "'/etc/passwd'; expected a path below"),
        ("a.json", json.dumps({"0": {**ITEM, "filename": "2.png"}}), "2.png: cannot be read"),
        ("a.json", json.dumps({"0": {**ITEM, "filename": "\ud800.png"}}), "expected a path below"),
        ("a.json", json.dumps({"0": {**ITEM, "caption": " "}}), "a.json: 0: no caption under 'caption'"),
        ("a.json", json.dumps({"0": {**ITEM, "caption": "\ud800"}}), "a.json: 0: caption with a lone surrogate"),
    ],
)
def test_bad_sugarcrepe_files_are_refused(tmp_path, name, content, message):
    data = sugarcrepe(tmp_path / "fine", {"b": [(1, 1, 2)]})
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        evaluate(PlainModel(12), [SugarCrepeConfig(data=data | {"path": tmp_path / name})])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", None, "a.jsonl: cannot be read"),
        ("a.jsonl", "", "a.jsonl: is empty"),
        ("a.jsonl", "{}\n", "a.jsonl:1: image_0: Field required; expected image_0, image_1, caption_0, caption_1"),
        ("a.parquet", "PAR1", "a.parquet: cannot be read as Parquet"),
        ("a.parquet", {"image_0": [b""]}, "a.parquet: got the columns image_0; expected image_0, image_1, caption_0"),
        (
            "a.parquet",
            {"image_0": [1], "image_1": [b""], "caption_0": ["a"], "caption_1": ["b"]},
            "row 0: image_0: expected the bytes of an image",
        ),
        (
            "a.parquet",
            {"image_0": [b""], "image_1": [b""], "caption_0": [1], "caption_1": ["b"]},
            "row 0: key 'caption' contains a int; expected text",
        ),
    ],
)
def test_bad_winoground_files_are_refused(tmp_path, name, content, message):
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    elif content is not None:
        pyarrow.parquet.write_table(pyarrow.table(content), tmp_path / name)
    with pytest.raises(DataError, match=message):
        evaluate(PlainModel(12), [WinogroundConfig(data={"path": tmp_path / name})])


def test_wrong_settings_are_refused(tmp_path):
    path = winoground(tmp_path, [(1, 2, 1, 2)], parquet=True)
    with pytest.raises(ValidationError, match="got limit 3; expected null"):
        WinogroundConfig(data={"path": path}, limit=3)
    with pytest.raises(ValidationError, match="weight"):
        WinogroundConfig(data={"path": path, "weight": 1.0})
    with pytest.raises(DataError, match="contains its images"):
        evaluate(PlainModel(12), [WinogroundConfig(data={"path": path, "images": tmp_path})])
    with pytest.raises(DataError, match="no such folder; expected the images that"):
        evaluate(
            PlainModel(12),
            [SugarCrepeConfig(data=sugarcrepe(tmp_path / "s", {"a": [(1, 1, 2)]}) | {"images": tmp_path / "n"})],
        )
