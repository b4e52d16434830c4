import dataclasses
import gc
import io
import re
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.evaluation.made import (
    IDENTITY,
    PRODUCT,
    PlainModel,
    caption_shards,
    caption_tar,
    class_shards,
    class_tar,
    number_shards,
    png,
    tiny_clip,
)
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, decode_image
from vqclip.errors import DataError, StopRequested
from vqclip.evaluation import (
    Details,
    DetailsConfig,
    RetrievalConfig,
    ZeroShotConfig,
    evaluate,
    read_evaluation,
    stored_files,
    write_evaluations,
)
from vqclip.evaluation.details import code_map, draw_map, find_grid
from vqclip.evaluation.image_details import (
    ImageDetails,
    choose_examples,
    class_accuracies,
    codebook_names,
    largest_confusions,
)
from vqclip.evaluation.intervals import wilson
from vqclip.evaluation.ranking import Ranks
from vqclip.model import CLIP
from vqclip.nn.layers import QueryReduction
from vqclip.quantizers import FSQ, LFQ, Identity, Product, Residual

SMALL = DetailsConfig(hits=2, misses=3, nearest=2)


def details_of(model, folder, amounts=SMALL):
    return evaluate(model, [ZeroShotConfig(data=ClassShardsConfig(path=folder))], details=amounts)[0].details


def summary(section):
    """The number of the first image of each card, its title and its note."""
    return [(int(card.items[0].name[-5:]), card.title.strip("“”"), card.note) for card in section.cards]


def number_captions(folder, captions):
    """Images of colour (n, n, n) with the captions of number n; a caption is found by the number in it."""
    caption_tar(folder / "0.tar", map(png, range(len(captions))), captions)
    return RetrievalConfig(data=CaptionShardsConfig(path=str(folder / "*.tar"), captions="txt_lines"))


def test_hits_and_misses_of_classes_are_the_known_ones(tmp_path):
    folder = number_shards(tmp_path, [0, 1, 2, 0, 1], 4)
    model = PlainModel(4)
    image = torch.eye(4)
    image[1] = F.normalize(torch.tensor([0.0, 0.3, 0.0, 0.9]), dim=0)  # 3 is nearer than the right 1, 0 and 2 farther
    image[2] = F.normalize(torch.tensor([0.0, 0.3, 0.9, 0.0]), dim=0)
    model.image.embed = lambda ids, precision="fp32": image[ids[:, 0, 0]] * model.image.weight
    (result,) = evaluate(model, [ZeroShotConfig(data=ClassShardsConfig(path=folder))], details=SMALL)
    misses, hits = result.details.examples
    assert (misses.title, hits.title) == tuple(f"From image to class: {x}" for x in ("worst misses", "clearest hits"))
    assert summary(hits) == [(index, "0", "the right class is number 1 of 4") for index in (0, 3)]
    assert [each[:2] for each in summary(misses)] == [(1, "1"), (4, "1")]
    assert misses.cards[0].note == "the right class is number 2 of 4"
    image, *found = misses.cards[0].items
    assert [(each.text, each.right) for each in found] == [("3", False), ("1", True)]
    assert [each.note for each in found] == [f"✗ wrong · {0.9**0.5:.2f}", f"✓ right · {0.3 / 0.9**0.5:.2f}"]
    assert Image.open(io.BytesIO(image.image)).size == (16, 16)
    assert result.intervals["codes_only"]["top1"] == wilson(0.6, 5)
    assert "details" not in result.to_json()


def test_hits_and_misses_of_captions_are_the_known_ones(tmp_path):
    # The second caption of image 1 is that of image 3; image 2 has only the caption of image 0.
    task = number_captions(tmp_path, [["no 0"], ["no 1", "number 3"], ["number 0"], ["no 3"]])
    (result,) = evaluate(PlainModel(4), [task], details=SMALL)
    text_misses, text_hits, image_misses, image_hits = result.details.examples
    assert summary(text_hits) == [(1, "no 1", "the right caption is number 1 of 5")]  # the others are tied
    assert summary(text_misses) == [(2, "number 0", "the right caption is number 3 of 5")]
    assert [each[:2] for each in summary(image_hits)] == [(0, "no 0"), (1, "no 1")]
    assert [each[:2] for each in summary(image_misses)] == [(1, "number 3"), (2, "number 0")]
    worst = image_misses.cards[0]
    assert worst.note == "the right image is number 3 of 4"
    nearest = [(each.name[-5:], each.right, each.note[-4:]) for each in worst.items[1:]]
    assert nearest == [("00003", False, "1.00"), ("00000", False, "0.00")]
    assert set(result.intervals) == {"continuous", "quantized", "codes_only"}
    assert result.intervals["codes_only"]["i2t_r1"] == wilson(result.figures["codes_only"]["i2t_r1"], 4)


def details_on_rank(folder):
    tasks = [
        ZeroShotConfig(data=ClassShardsConfig(path=folder / "classes"), batch_size=4, max_bad_fraction=0.2),
        RetrievalConfig(data=CaptionShardsConfig(path=str(folder / "captions"), captions="txt_lines"), batch_size=4),
    ]
    found = evaluate(CLIP.from_pretrained(folder / "model"), tasks, details=SMALL)
    return [result.details and result.details.model_dump(mode="json") for result in found]


def test_ranks_together_make_the_same_details_as_one(ranks, tmp_path):
    class_shards(tmp_path / "classes", 11, damaged=[2])
    caption_shards(tmp_path / "captions", [[f"number {i}", f"a picture {i}"][: 1 + i % 2] for i in range(9)])
    tiny_clip({"kind": "residual", "layer": {"kind": "lfq", "bits": 6}, "depth": 2}).save_pretrained(tmp_path / "model")
    ((alone),) = ranks(1, details_on_rank, tmp_path)
    assert all(len(each["codes"]) > 1 for each in alone)
    first, second = ranks(2, details_on_rank, tmp_path)
    assert second == [None, None]
    assert approximately(first) == approximately(alone)


def test_identity_has_intervals_but_nothing_of_codes_and_says_why(tmp_path):
    folder = class_shards(tmp_path / "classes")
    task = number_captions(tmp_path / "captions", [["one"], ["two"]])
    tasks = [ZeroShotConfig(data=ClassShardsConfig(path=folder)), task]
    for result in evaluate(tiny_clip(IDENTITY), tasks, details=SMALL):
        details = result.details
        assert set(result.intervals) == {"continuous", "quantized"}
        assert result.figures["continuous"] == result.figures["quantized"]
        assert (result.figures["codes_only"], result.usage) == (None, {"image": None, "text": None})
        assert result.notes == ["no codes-only figures: the image and the text quantizer has no codebook (Identity)"]
        assert (details.examples, details.codes) == ((), ())
        assert [each.heads for each in details.tables] in ([], [("class", "images", "continuous, %", "quantized, %")])
        assert Details.model_validate_json(details.model_dump_json()) == details


def test_bad_samples_are_left_out_and_rows_still_belong_to_their_images(tmp_path):
    folder = number_shards(tmp_path, [], 8)
    class_tar(folder / "test" / "0.tar", [b"no image" if n in (1, 4) else png(n) for n in range(8)], range(8))
    task = ZeroShotConfig(data=ClassShardsConfig(path=folder), max_bad_fraction=0.5, batch_size=2)
    (result,) = evaluate(PlainModel(8), [task], details=DetailsConfig(misses=0, hits=8))
    found = [each[:2] for each in summary(result.details.examples[0])]
    assert found == [(number, str(number)) for number in (0, 2, 3, 5, 6, 7)]
    assert result.samples == 6


def test_an_image_that_cannot_be_read_again_has_no_thumbnail(tmp_path):
    with mock.patch("vqclip.evaluation.details.read_decoded", side_effect=DataError("gone")):
        details = details_of(PlainModel(2), number_shards(tmp_path, [0, 1], 2))
    assert [each.items[0].image for each in details.examples[0].cards] == [None, None]
    assert "patches" not in [each.layout for each in details.codes]


def test_data_and_images_are_freed_with_the_evaluation(tmp_path, monkeypatch):
    """At once: those of a large table would otherwise be in memory twice at the next one."""
    opened, build = [], ClassShardsConfig.build

    def record(*args, **options):
        source = build(*args, **options)
        opened.append(weakref.ref(source))
        return source

    monkeypatch.setattr(ClassShardsConfig, "build", record)
    tasks = [ZeroShotConfig(data=ClassShardsConfig(path=number_shards(tmp_path, [0, 1], 2)))]
    gc.disable()
    try:
        evaluate(PlainModel(2), tasks, details=SMALL)
        assert [source() for source in opened] == [None]
    finally:
        gc.enable()


def test_details_that_cannot_be_made_cost_no_figure_but_a_signal_stops_the_evaluation(tmp_path, caplog):
    tasks = [ZeroShotConfig(data=ClassShardsConfig(path=number_shards(tmp_path, [0, 1], 2)))]
    for error in (OSError("the disk is gone"), torch.OutOfMemoryError("of the device")):
        with mock.patch.object(ImageDetails, "codes", side_effect=error):
            (result,) = evaluate(PlainModel(2), tasks, details=SMALL)
        assert (result.details, result.figures["codes_only"]["top1"]) == (None, 1.0)
        told = f"no details for the report, the figures are not affected: {type(error).__name__}: {error}"
        assert told in caplog.text
    with mock.patch.object(ImageDetails, "codes", side_effect=StopRequested), pytest.raises(StopRequested):
        evaluate(PlainModel(2), tasks, details=SMALL)


def test_code_maps_and_galleries_of_a_real_model(tmp_path):
    model, folder = tiny_clip(PRODUCT), class_shards(tmp_path)
    task = ZeroShotConfig(data=ClassShardsConfig(path=folder), limit=20)
    amounts = DetailsConfig(code_maps=2, gallery_codes=2, gallery_patches=2, gallery_images=10)
    (result,) = evaluate(model, [task], details=amounts)
    (maps, *galleries), source = result.details.codes, task.data.build()
    assert "one panel a codebook; equal" in maps.note
    assert "3 codebooks of 9 codes." in maps.note
    pixels = {i: model.image.transform(decode_image(source.read(i).image)) for i in range(22)}
    model.eval()
    for index, card in zip([0, 11], maps.cards, strict=True):
        ids = model.image.encode(pixels[index][None])[0].T.tolist()
        panels = [(f"codebook {number}", code_map(codebook, 2)) for number, codebook in enumerate(ids)]
        assert [(each.text, each.image) for each in card.items[1:]] == panels
    assert [(each.title, len(each.cards)) for each in galleries] == [("codebook 0", 2), ("codebook 1", 2)]
    every = model.image.encode(torch.stack([pixels[n * 22 // 20] for n in range(0, 20, 2)]))
    for number, gallery in enumerate(galleries):
        for card in gallery.cards:
            code, images = map(int, re.fullmatch(r"code (\d+), in (\d+) of 10 images", card.note).groups())
            contains = (every[..., number] == code).any(1)
            assert images == int(contains.sum()) >= 2
            first = int(contains.nonzero()[0])
            token = int((every[first, :, number] == code).nonzero()[0])
            top, left = 8 * (token // 2), 8 * (token % 2)
            patch = np.asarray(Image.open(io.BytesIO(card.items[0].image))).transpose(2, 0, 1)
            expected = pixels[2 * first * 22 // 20][:, top : top + 8, left : left + 8]
            assert np.array_equal(patch, expected.numpy())


@pytest.mark.parametrize(("tokens", "grid"), [(16, (4, 4)), (12, (3, 4)), (7, (1, 7)), (1, (1, 1)), (0, (1, 1))])
def test_tokens_fill_a_grid(tokens, grid):
    assert find_grid(tokens) == grid


def test_equal_codes_have_equal_colours_and_absent_ones_none():
    drawn = np.asarray(draw_map([3, 4, 3, -1, 2**40], 3)).reshape(-1, 4).tolist()
    assert drawn[0] == drawn[2] != drawn[1]
    assert [pixel[3] for pixel in drawn] == [255, 255, 255, 0, 255, 0]


def test_reduced_tokens_have_no_place_and_amounts_of_0_leave_parts_out(tmp_path):
    model = tiny_clip()
    model.image.reduce = QueryReduction(16, 4, 2)
    codes = details_of(model, class_shards(tmp_path), DetailsConfig()).codes
    assert [(each.layout, len(each.cards)) for each in codes] == [("maps", 4)]
    assert "have no place in the image" in codes[0].note
    none = details_of(tiny_clip(PRODUCT), tmp_path, DetailsConfig(hits=0, misses=0, code_maps=0, gallery_codes=0))
    assert (none.codes, none.examples) == ((), ())


@pytest.mark.parametrize(
    ("quantizer", "names"),
    [
        (FSQ((4,)), ["codebook 0"]),
        (Product(FSQ((4,)), 3), ["codebook 0", "codebook 1", "codebook 2"]),
        (Residual(LFQ(3), 2), ["stage 0", "stage 1"]),
        (Residual(Product(LFQ(3), 2), 2), [f"stage {s}, codebook {c}" for s in (0, 1) for c in (0, 1)]),
        (Identity(4), []),
    ],
)
def test_names_of_codebooks(quantizer, names):
    assert codebook_names(quantizer) == names


def test_the_largest_confusions_and_the_classes_with_the_lowest_accuracy_are_listed(monkeypatch):
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    found = largest_confusions(["a", "b", "c"], labels, torch.tensor([0, 1, 1, 1, 2, 2]))
    assert found.rows == (("a", "b", "2"), ("b", "c", "1"))
    monkeypatch.setattr("vqclip.evaluation.image_details.MAX_CLASSES", 2)
    labels = torch.tensor([0, 0, 1, 1, 3, 3])
    hits = {"codes_only": torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.float64)}
    found = class_accuracies(["a", "b", "c", "d"], labels, hits)
    assert found.rows == (("d", "2", "0.0"), ("b", "2", "50.0"))


def approximately(value):
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: approximately(each) for key, each in value.items()}
    return [approximately(each) for each in value] if isinstance(value, list) else value


def test_misses_are_those_with_the_worst_rank_and_of_classes_the_most_confident():
    ranks = Ranks(
        best=torch.tensor([0.9, 0.1, 0.5, 0.8, 0.5]),
        above=torch.tensor([0, 1, 4, 0, 0]),
        rights=torch.ones(5, dtype=torch.int64),
        wrongs=torch.tensor([0, 0, 0, 0, 2]),
        best_wrong=torch.tensor([0.5, 0.9, 0.6, 0.1, 0.5]),
        first=torch.zeros(5, dtype=torch.int64),
    )
    assert choose_examples(ranks, DetailsConfig(), "image to caption") == ([3, 0], [2, 1, 4])
    assert choose_examples(ranks, DetailsConfig(), "image to class") == ([3, 0], [1, 2, 4])


def test_the_newest_evaluation_is_read_again_with_its_step_and_others_go(tmp_path):
    task = number_captions(tmp_path / "data", [["no 0"], ["no 1", "number 3"], ["number 0"], ["no 3"]])
    (result,) = evaluate(PlainModel(4), [task], details=SMALL)
    other = dataclasses.replace(result, name="../../etc/<script>", details=None)
    paths = write_evaluations(tmp_path / "run", 30, [result, other])
    assert paths == stored_files(tmp_path / "run")
    assert {path.parent for path in paths} == {tmp_path / "run" / "report"}
    found = [read_evaluation(path) for path in paths]
    assert [(each.step, each.result) for each in found] == [(30, result), (30, other)]
    (tmp_path / "run" / "report" / "notes.txt").write_text("of the user")
    note = "https://cdn.example/a.tar?X-Amz-Signature=topsecret is slow"
    (path,) = write_evaluations(tmp_path / "run", 31, [dataclasses.replace(result, notes=[note])])
    assert stored_files(tmp_path / "run") == [path]
    assert read_evaluation(path).step == 31
    assert (tmp_path / "run" / "report" / "notes.txt").exists()
    assert "topsecret" not in path.read_text()
