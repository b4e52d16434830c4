from __future__ import annotations

import io
import json
import os

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.evaluation.made import PlainModel, caption_shards, class_shards, png, tiny_clip, write_tar
from tests.evaluation.test_zero_shot import number_shards
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.errors import CheckpointError
from vqclip.evaluation import Details, DetailsConfig, RetrievalConfig, ZeroShotConfig, evaluate
from vqclip.evaluation.intervals import wilson
from vqclip.model import CLIP

SMALL = DetailsConfig(hits=2, misses=3, nearest=2)


def number_captions(folder, captions):
    """Images of colour (n, n, n) with the captions of number n; a caption is found by the number in it."""
    members = {}
    for number, lines in enumerate(captions):
        members |= {f"{number:05d}.png": png(number), f"{number:05d}.txt": "\n".join(lines).encode()}
    write_tar(folder / "0.tar", members)
    return RetrievalConfig(data=CaptionShardsConfig(path=str(folder / "*.tar"), captions="txt_lines"))


def test_hits_and_misses_of_classes_are_the_known_ones(tmp_path):
    folder = number_shards(tmp_path, [0, 1, 2, 0, 1], 4)
    model = PlainModel(4)
    image = torch.eye(4)
    image[1] = F.normalize(torch.tensor([0.0, 0.3, 0.0, 0.9]), dim=0)  # 3 is nearer than the right 1, 0 and 2 farther
    image[2] = F.normalize(torch.tensor([0.0, 0.3, 0.9, 0.0]), dim=0)
    model.image.embed = lambda ids: image[ids[:, 0, 0]] * model.image.weight
    (result,) = evaluate(model, [ZeroShotConfig(data=ClassShardsConfig(path=folder))], details=SMALL)
    (examples,) = result.details.examples
    assert examples.direction == "image_to_class"
    assert [(each.image.index, each.text, each.rank) for each in examples.hits] == [(0, "0", 1), (3, "0", 1)]
    assert [(each.image.index, each.text, each.rank) for each in examples.misses] == [(1, "1", 2), (4, "1", 2)]
    first = examples.misses[0]
    assert [(found.text, found.right) for found in first.found] == [("3", False), ("1", True)]
    assert first.found[0].score == pytest.approx(0.9 / 0.9**0.5)
    assert first.score == pytest.approx(0.3 / 0.9**0.5)
    assert first.candidates == 4
    assert first.image.name.endswith("00001")
    assert Image.open(io.BytesIO(first.image.thumbnail)).size == (16, 16)
    assert result.details.intervals["codes_only"]["top1"] == wilson(0.6, 5)
    assert "details" not in result.to_json()


def test_hits_and_misses_of_captions_are_the_known_ones(tmp_path):
    # The second caption of image 1 is that of image 3; image 2 has only the caption of image 0.
    task = number_captions(tmp_path, [["no 0"], ["no 1", "number 3"], ["number 0"], ["no 3"]])
    (result,) = evaluate(PlainModel(4), [task], details=SMALL)
    to_text, to_image = result.details.examples
    assert (to_text.direction, to_image.direction) == ("image_to_text", "text_to_image")
    assert [(each.image.index, each.text) for each in to_text.hits] == [(1, "no 1")]  # the others are tied
    assert [(each.image.index, each.text, each.rank) for each in to_text.misses] == [(2, "number 0", 3)]
    assert [each.text for each in to_image.hits] == ["no 0", "no 1"]
    assert [(each.image.index, each.text) for each in to_image.misses] == [(1, "number 3"), (2, "number 0")]
    worst = to_image.misses[0]
    assert (worst.rank, worst.candidates, worst.score) == (3, 4, 0)
    assert [(found.image.index, found.text, found.right) for found in worst.found] == [
        (3, "no 3", False),
        (0, "no 0", False),
    ]
    assert set(result.details.intervals) == {"continuous", "quantized", "codes_only"}
    assert result.details.intervals["codes_only"]["i2t_r1"] == wilson(result.figures["codes_only"]["i2t_r1"], 4)


def details_on_rank(folder):
    os.environ["VQCLIP_CACHE"] = str(folder / "cache")
    tasks = [
        ZeroShotConfig(data=ClassShardsConfig(path=folder / "classes"), batch_size=4),
        RetrievalConfig(data=CaptionShardsConfig(path=str(folder / "captions"), captions="txt_lines"), batch_size=4),
    ]
    found = evaluate(CLIP.from_pretrained(folder / "model"), tasks, details=SMALL)
    return [result.details and result.details.to_json() for result in found]


def test_ranks_together_make_the_same_details_as_one(ranks, tmp_path):
    class_shards(tmp_path / "classes")
    caption_shards(tmp_path / "captions", [[f"number {i}", f"a picture {i}"][: 1 + i % 2] for i in range(9)])
    tiny_clip().save_pretrained(tmp_path / "model")
    ((alone),) = ranks(1, details_on_rank, tmp_path)
    first, second = ranks(2, details_on_rank, tmp_path)
    assert second == [None, None]
    assert approximately(first) == approximately(alone)


def approximately(value):
    """Round all numbers."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: approximately(each) for key, each in value.items()}
    return [approximately(each) for each in value] if isinstance(value, list) else value


def test_hostile_texts_survive_as_data(tmp_path):
    hostile = ['<script>alert("x")</script> & 0', "\u202e1 \x1b[m' {{x*x}}", "2" + "long " * 200]
    (result,) = evaluate(PlainModel(256), [number_captions(tmp_path, [[each] for each in hostile])], details=SMALL)
    body = json.loads(json.dumps(result.details.to_json()))
    again = Details.from_json(body)
    assert again == result.details
    shown = {each.text for examples in again.examples for each in (*examples.hits, *examples.misses)}
    assert hostile[0] in shown
    assert max(map(len, shown)) <= 300


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(colour="red"),
        lambda body: body["intervals"]["codes_only"].update(top1=[0, 2]),
        lambda body: body["intervals"]["codes_only"].update(top1=["0", "1"]),
        lambda body: body.update(samples=-1),
        lambda body: body["examples"][0].update(direction="sideways"),
        lambda body: body["examples"][0]["hits"][0].update(text="x" * 301),
        lambda body: body["examples"][0]["hits"][0]["image"].update(thumbnail="not base64!"),
        lambda body: body["examples"][0]["hits"][0]["image"].update(thumbnail="A" * 200_000),
        lambda body: body["examples"][0].update(hits=body["examples"][0]["hits"] * 50),
        lambda body: body.pop("samples"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, change):
    folder = number_shards(tmp_path, [0, 1, 2], 4)
    (result,) = evaluate(PlainModel(4), [ZeroShotConfig(data=ClassShardsConfig(path=folder))], details=SMALL)
    body = result.details.to_json()
    Details.from_json(json.loads(json.dumps(body)))
    change(body)
    with pytest.raises(CheckpointError, match="details: "):
        Details.from_json(body)
