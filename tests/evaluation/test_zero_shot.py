import json

import pytest
import torch
from pydantic import ValidationError

from tests.evaluation.made import PlainModel, caption_tar, class_shards, image_folder, number_shards, png, tiny_clip
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, FolderConfig
from vqclip.errors import DataError
from vqclip.evaluation import RetrievalConfig, ZeroShotConfig, evaluate
from vqclip.evaluation.retrieval import both_ranks, chance, recalls
from vqclip.evaluation.zero_shot import class_embeddings


def test_perfect_codes_score_100_percent_and_the_blind_continuous_path_scores_chance(tmp_path):
    folder = number_shards(tmp_path, [i % 12 for i in range(30)], 12)
    (result,) = evaluate(PlainModel(12), [ZeroShotConfig(name="numbers", data=ClassShardsConfig(path=folder))])
    perfect = {"top1": 1.0, "top5": 1.0, "mean_per_class": 1.0}
    assert result.figures["quantized"] == result.figures["codes_only"] == perfect
    assert result.chance == pytest.approx({"top1": 1 / 12, "top5": 5 / 12, "mean_per_class": 1 / 12})
    assert result.figures["continuous"] == pytest.approx(result.chance)
    assert (result.samples, result.classes, result.captions, result.notes) == (30, 12, 12, [])
    assert result.usage["image"].codes_used == [12]
    assert result.usage["image"].tokens == 30
    assert json.loads(json.dumps(result.to_json()))["usage"]["text"]["tokens"] == 12


def test_templates_are_averaged_and_can_be_replaced(tmp_path):
    folder = number_shards(tmp_path, [0, 1], 5, ("number {c}", "the {c}"))
    config = ZeroShotConfig(data=ClassShardsConfig(path=folder))
    assert evaluate(PlainModel(5), [config])[0].captions == 10
    other = config.model_copy(update={"templates": ("{c}",)})
    assert evaluate(PlainModel(5), [other])[0].captions == 5
    prompts = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0]])
    assert torch.allclose(class_embeddings(prompts, [2, 2]), torch.tensor([[0.5**0.5, 0.5**0.5], [1, 0]]))


def test_notes_tell_of_equal_class_names_and_of_files_left_out(tmp_path):
    folder = class_shards(tmp_path / "classes")
    (folder / "classnames.txt").write_text("red\ngreen\nred\nwhite\n")  # as ImageNet's do
    images = image_folder(tmp_path / "images")
    (images / "green" / "a.psd").touch()
    labelled = ZeroShotConfig(data=ClassShardsConfig(path=folder))
    classes, plain = evaluate(tiny_clip(), [labelled, ZeroShotConfig(data=FolderConfig(path=images), name="f")])
    assert classes.notes == ["class names that occur more than once, which the model cannot tell apart: red"]
    assert [note.split(" without")[0] for note in plain.notes] == ["left out: 1 file"]


def test_templates_and_classes_are_read_from_files(tmp_path):
    folder = number_shards(tmp_path / "data", [0, 1, 2], 3)
    config = ZeroShotConfig(data=ClassShardsConfig(path=folder))
    (tmp_path / "prompts.txt").write_text("the {c}\na {c}\n{c}!\n")
    files = {
        "lines.txt": "2\n1\n0\n",
        "list.json": json.dumps(["2", ["1", "1."], "0"]),
        "object.json": json.dumps({"2": ["0", "0.", "0,"], "0": "2", "1": "1"}),
    }
    for (name, text), prompts in zip(files.items(), (9, 12, 15), strict=True):
        (tmp_path / name).write_text(text)
        change = {"classes_file": tmp_path / name, "templates_file": tmp_path / "prompts.txt"}
        (result,) = evaluate(PlainModel(3), [config.model_copy(update=change)])
        assert result.captions == prompts
        assert result.figures["codes_only"]["top1"] == pytest.approx(1 / 3)  # the middle one alone keeps its name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.txt", "a\nb\n", r"c\.txt: got 2 classes; expected 3, in the order of '0', '1', '2'"),
        ("c.json", '["a", "b"]', "got 2 classes; expected 3"),
        ("c.json", '["a", [], "b"]', r"got \[\] as names of a class"),
        ("c.json", '["a", "\\ud800", "b"]', "of characters that can be printed"),
        ("c.json", '{"0": "a", "1": "b", "x": "c"}', "missing '2'; unknown 'x'; expected the data's class names"),
        ("c.json", "[" * 10**5, "expected a list with a name"),
        ("t.txt", "a photo\n", r"t\.txt:1: no {c} for the class name in 'a photo'"),
        ("none.txt", None, "none.txt: cannot be read"),
    ],
)
def test_bad_files_of_prompts_are_refused(tmp_path, name, content, message):
    folder = number_shards(tmp_path / "data", [0, 1, 2], 3)
    if content is not None:
        (tmp_path / name).write_text(content)
    key = "templates_file" if name == "t.txt" else "classes_file"
    task = ZeroShotConfig.model_validate({"data": {"kind": "classes", "path": folder}, key: tmp_path / name})
    with pytest.raises(DataError, match=message):
        evaluate(PlainModel(3), [task])


def test_bad_templates_are_refused():
    for change in ({"templates": ("a picture",)}, {"templates": ("{c}",), "templates_file": "t"}):
        with pytest.raises(ValidationError):
            ZeroShotConfig.model_validate({"data": {"kind": "scenes"}} | change)


# Retrieval.


def test_the_same_embedding_for_everything_scores_chance():
    counts = torch.tensor([1, 5, 2, 3, 1, 1, 4, 2, 2, 1, 7, 1])
    images, captions = torch.ones(12, 3), torch.ones(30, 3)
    assert recalls(both_ranks(images, captions, counts)) == pytest.approx(chance(counts))
    assert chance(counts)["t2i_r5"] == pytest.approx(5 / 12)
    assert chance(counts)["i2t_r1"] == pytest.approx(2.5 / 30)


def test_equal_captions_of_different_images_share_their_place(tmp_path):
    caption_tar(tmp_path / "0.tar", map(png, [0, 1, 0, 1]), ["0", "1", "0", "1"])  # two images of each number
    (result,) = evaluate(PlainModel(2), [RetrievalConfig(data=CaptionShardsConfig(path=str(tmp_path)))])
    assert (result.samples, result.captions, result.classes) == (4, 4, None)
    all_found = dict.fromkeys(("i2t_r5", "i2t_r10", "t2i_r5", "t2i_r10"), 1.0)
    assert result.figures["codes_only"] == {"i2t_r1": 0.5, "t2i_r1": 0.5} | all_found
