import csv
import dataclasses
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from tests.evaluation.made import CAPTIONS, IDENTITY, caption_shards, class_shards, noisy, tiny_clip
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.data.decode import decode_image
from vqclip.errors import ConfigError, NonFiniteError
from vqclip.evaluation import (
    DetailsConfig,
    PixelQualityConfig,
    RetrievalConfig,
    ZeroShotConfig,
    evaluate,
    format_line,
    format_results,
    prepare,
    read_evaluation,
    write_csv,
    write_evaluations,
)
from vqclip.model import CLIP, load_pretrained
from vqclip.pixels import ConvolutionalPixelsConfig, PixelsConfig, attach
from vqclip.pixels.metrics import compare_images

STAGES = {"kind": "residual", "depth": 2, "layer": {"kind": "lfq", "bits": 3}}
RESIDUAL = {"kind": "product", "codebooks": 2, "layer": STAGES}
DETAIL = {"quantizer": {"kind": "fsq", "levels": [4, 4]}, "stages": 2, "channels": 4, "channels_per_group": 2}


def with_decoder(quantizer=RESIDUAL, size=16, detail=None, stages=None):
    model = tiny_clip(quantizer)
    decoder = ConvolutionalPixelsConfig(channels=4, max_channels=8, channels_per_group=2, stages=stages)
    config = PixelsConfig.model_validate({"decoder": decoder, "image_size": size, "detail": detail})
    attach(model.image, config.build(model.image.quantizer.dim, model.image.num_tokens))
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    class_shards(tmp_path / "classes")
    caption_shards(tmp_path / "captions", CAPTIONS)
    with_decoder().save_pretrained(tmp_path / "model")
    return tmp_path


def classes(folder, **settings):
    settings = {"codecs": (), "batch_size": 4} | settings
    return PixelQualityConfig(data=ClassShardsConfig(path=folder / "classes"), **settings)


def captions(folder, **settings):
    data = CaptionShardsConfig(path=str(folder / "captions"), captions="txt_lines")
    return PixelQualityConfig(**{"data": data, "codecs": (), "batch_size": 4, "name": "pairs"} | settings)


def originals():
    return torch.stack([decode_image(image) for image in noisy(22)])


def psnr(made, real):
    return pytest.approx(float(compare_images(made, real)["psnr"].mean()))


def rows_of(result):
    return {row.method: row for row in result.pixels.rows}


def test_figures_of_codes_prefixes_and_means_are_those_of_stored_ids_decoded(folder):
    model, real = with_decoder(), originals()
    [result] = evaluate(model, [classes(folder)])
    ids, found = model.image.encode(real), rows_of(result)
    made = (model.image.decode_pixels(ids) * 255).round().to(torch.uint8)
    expected, codes = compare_images(made, real), found["codes"]
    assert codes.bits_per_image == model.image.bits_per_sample == 4 * 12
    for figure in ("psnr", "ssim", "mae"):
        assert codes.figures[figure] == pytest.approx(float(expected[figure].mean()))
        low, high = codes.intervals[figure]
        assert low < codes.figures[figure] < high
    low, high = codes.intervals["psnr_of_mse"]
    assert low < codes.figures["psnr_of_mse"] < high
    figures = result.figures["codes_only"]
    assert figures["psnr"] == codes.figures["psnr"]
    assert figures["id_agreement"] == pytest.approx(float((model.image.encode(made) == ids).double().mean()))
    assert {**figures, "id_agreement": 0} == {**result.figures["quantized"], "id_agreement": 0}
    assert figures["psnr"] != result.figures["continuous"]["psnr"] == found["quantizer bypassed"].figures["psnr"]
    row = found["codes, 1 of 2 stages, 2 of 2 codebooks"]
    assert (row.bits_per_image, row.figures["psnr"]) == (24, psnr(model.image.decode_pixels(ids, stages=1), real))
    mean = real.double().mean(dim=0).round().to(torch.uint8).expand_as(real)
    assert found["mean image"].figures["psnr"] == psnr(mean, real)
    colour = (real.double().mean(dim=(2, 3), keepdim=True)).round().to(torch.uint8).expand_as(real)
    assert found["mean colour"].figures["mae"] == pytest.approx(float(compare_images(colour, real)["mae"].mean()))
    assert [found[name].bits_per_image for name in ("mean image", "mean colour", "quantizer bypassed")] == [0, 24, None]
    [fewer] = evaluate(model, [classes(folder, prefixes=False)])
    assert [*rows_of(fewer)] == ["codes", "quantizer bypassed", "mean image", "mean colour"]


def test_a_decoder_of_first_stages_has_their_bits(folder):
    model, real = with_decoder(stages=1), originals()
    [result] = evaluate(model, [classes(folder)])
    found = rows_of(result)
    assert found["codes"].bits_per_image == 24
    assert found["codes"].figures["psnr"] == psnr(model.image.decode_pixels(model.image.encode(real)), real)
    assert result.figures["quantized"].items() <= result.figures["codes_only"].items()
    assert [each for each in found if "stages" in each] == ["codes, 1 of 2 stages, 1 of 2 codebooks"]


def test_detail_stages_are_stored_too(folder):
    model, real = with_decoder(detail=DETAIL), originals()
    [result] = evaluate(model, [classes(folder)])
    found = rows_of(result)
    ids = model.image.encode_pixels(real)
    for method, bits, stages in (
        ("codes", 48 + 4 * 8, 2),
        ("codes, 1 of 2 detail stages", 48 + 4 * 4, 1),
        ("codes, 2 of 2 stages, 2 of 2 codebooks, no detail", 48, 0),
    ):
        assert found[method].figures["psnr"] == psnr(model.image.decode_pixels(ids, detail=stages), real)
        assert found[method].bits_per_image == bits
    assert found["codes, 1 of 2 stages, 2 of 2 codebooks, no detail"].bits_per_image == 24
    assert result.figures["codes_only"]["psnr"] == result.figures["quantized"]["psnr"]
    assert len({row.figures["psnr"] for row in result.pixels.rows}) == len(result.pixels.rows)


def test_perfect_reconstructions_mean_what_the_originals_mean(folder):
    model, parts = with_decoder(), originals().split(4)
    # The codes, the continuous vectors and the quantized ones of a batch, then those of the next one.
    answers = (part.float() / 255 for part in parts for _ in range(3))
    model.image.pixels.forward = lambda vectors, detail=None: next(answers)
    [result] = evaluate(model, [classes(folder, prefixes=False)])
    for figures in result.figures.values():
        assert (figures["psnr"], figures["ssim"]) == (100, pytest.approx(1))
        assert figures["reconstructed_top1"] == figures["original_top1"]
    assert result.figures["codes_only"]["id_agreement"] == 1
    [zero_shot] = evaluate(model, [ZeroShotConfig(data=ClassShardsConfig(path=folder / "classes"))])
    assert result.figures["codes_only"]["original_top1"] == zero_shot.figures["codes_only"]["top1"]
    assert result.chance["reconstructed_top1"] == 0.25


def test_pairs_have_r_at_1(folder):
    [result] = evaluate(with_decoder(), [captions(folder)], details=DetailsConfig())
    assert (result.samples, result.captions, result.classes) == (9, 13, None)
    names = {f"{which}_{figure}" for which in ("original", "reconstructed") for figure in ("i2t_r1", "t2i_r1")}
    assert result.chance.keys() == names == result.intervals["codes_only"].keys()
    for name, (low, high) in result.intervals["codes_only"].items():
        assert low <= result.figures["codes_only"][name] <= high
    retrieval = RetrievalConfig(data=captions(folder).data, batch_size=4)
    [retrieved] = evaluate(with_decoder(), [retrieval])
    for figure in ("i2t_r1", "t2i_r1"):
        assert result.figures["codes_only"][f"original_{figure}"] == retrieved.figures["codes_only"][figure]
    [without] = evaluate(with_decoder(), [captions(folder, meaning=False)])
    assert without.chance == {}
    assert without.pixels == result.pixels


def test_a_decoder_of_another_size_than_the_tower_and_small_images_without_ssim(folder):
    model = with_decoder(size=32)
    [result] = evaluate(model, [classes(folder)])
    assert result.pixels.image_size == 32
    real = torch.stack([model.image.config.preprocess.build(32)(image) for image in originals()])
    made = model.image.decode_pixels(model.image.encode(originals()))
    assert rows_of(result)["codes"].figures["psnr"] == psnr(made, real)
    assert result.figures["quantized"]["psnr"] == result.figures["codes_only"]["psnr"]
    [result] = evaluate(with_decoder(size=8), [classes(folder)])
    assert "no SSIM: it needs 11 pixels of height and width" in result.notes
    assert "ssim" not in result.figures["codes_only"]
    assert "SSIM" not in format_results([result]).split("pixels: no SSIM")[0]
    assert format_line(result).startswith("pixels (codes only): PSNR ")


def test_without_codes_there_is_the_bypassed_quantizer_alone(folder):
    [result] = evaluate(with_decoder(IDENTITY), [classes(folder)])
    assert [*rows_of(result)] == ["quantizer bypassed", "mean image", "mean colour"]
    assert result.figures["codes_only"] is None
    assert result.figures["quantized"] == result.figures["continuous"]
    assert "quantizer bypassed" in format_results([result])


def test_results_name_what_they_depend_on_and_survive_files(folder):
    model = with_decoder()
    results = evaluate(model, [classes(folder, codecs=("jpeg",)), captions(folder)], details=DetailsConfig())
    first = results[0].pixels
    assert first.reference == f"classes {folder / 'classes'} split test"
    assert first.preprocessing == "shorter side resized, centre cropped, bicubic, antialiased, 8 bits"
    paths = write_evaluations(folder, 7, results)
    assert read_evaluation(paths[0]).result == results[0]
    write_csv(folder / "figures.csv", results)
    with (folder / "figures.csv").open() as file:
        rows = {(row["name"], row["mode"], row["figure"]): row for row in csv.DictReader(file)}
    assert float(rows["pixels", "codes_only", "psnr"]["rate"]) == results[0].figures["codes_only"]["psnr"]
    assert float(rows["pixels", "JPEG", "bits_per_image"]["rate"]) == rows_of(results[0])["JPEG"].bits_per_image
    text = format_results(results)
    assert text.count("stored as") == 2
    assert "files of at most 6 bytes, headers included: JPEG 0 %, JPEG, reduced size 0 % of the images" in text
    assert dataclasses.replace(results[0], pixels=None).to_json()["pixels"] is None


def test_a_tokenizer_of_images_alone_has_all_figures_but_those_of_texts(folder):
    model = with_decoder()
    model.image.save_pretrained(folder / "image")
    tasks = [classes(folder), captions(folder)]
    both, alone = evaluate(model, tasks), evaluate(load_pretrained(folder / "image"), tasks)
    told = "no zero-shot accuracy or R@1 of the reconstructions: the tokenizer is one of images alone"
    for one, other in zip(both, alone, strict=True):
        assert one.pixels == other.pixels
        figures = one.figures["codes_only"]
        of_texts = {key for key in figures if key.startswith(("original", "reconstructed"))}
        assert len(of_texts) >= 2
        assert other.figures["codes_only"] == {key: figures[key] for key in figures.keys() - of_texts}
        assert ([*other.usage], told in other.notes, told in one.notes) == (["image"], True, False)
    assert told not in evaluate(load_pretrained(folder / "image"), [classes(folder, meaning=False)])[0].notes
    zero_shot = ZeroShotConfig(data=ClassShardsConfig(path=folder / "classes"))
    for check in (evaluate, lambda model, tasks: prepare(tasks, model)):
        with pytest.raises(ConfigError, match="got kind zero_shot for a tokenizer of images alone; expected"):
            check(load_pretrained(folder / "image"), [zero_shot])


def test_a_model_without_a_decoder_is_refused(folder):
    with pytest.raises(ConfigError, match="this image tokenizer has no pixel decoder"):
        evaluate(tiny_clip(), [classes(folder)])
    with pytest.raises(ConfigError, match=r"^evaluation\[1\]: this image tokenizer has no"):
        prepare([ZeroShotConfig(data=classes(folder).data), classes(folder)], tiny_clip())
    prepare([classes(folder)], with_decoder())
    with pytest.raises(ValidationError, match=r"codecs[\s\S]*'png'"):
        classes(folder, codecs=("png",))


def distances_of(folder, limit=6, batch_size=4):
    network = {"kind": "tokenizer", "folder": str(folder / "model")}
    distances = [{"kind": "perceptual", "network": network}, {"kind": "frechet", "network": network}]
    task = classes(folder, distances=distances, limit=limit, batch_size=batch_size)
    [result] = evaluate(CLIP.from_pretrained(folder / "model"), [task])
    return result


def test_distances_in_the_features_of_networks(ranks, folder):
    result = distances_of(folder)
    [(name, distance)] = result.pixels.distances.items()
    assert re.fullmatch(r"Fréchet distance \(tokenizer [0-9a-f]{8}\)", name)
    assert 0 < rows_of(result)["codes"].figures["perceptual"] < 2
    assert f"{name}: " in (text := format_results([result]))
    assert re.search(r" perceptual\n.* distance\n", text)
    assert distances_of(folder, batch_size=6).pixels.distances == {name: pytest.approx(distance)}
    alone = distances_of(folder, limit=1)
    assert alone.pixels.distances == {}
    assert f"no {name}: it needs two images" in alone.notes
    # On three ranks one has no image.
    two = distances_of(folder, limit=2).pixels.distances
    for other in ranks(3, distances_of, folder, 2):
        assert other.pixels.distances == {name: pytest.approx(two[name], rel=1e-3)}
    perceptual = {"kind": "perceptual", "network": {"kind": "tokenizer", "folder": "x"}}
    with pytest.raises(ValidationError, match="each of lpips and perceptual at most once"):
        classes(folder, distances=[perceptual] * 2)
    with pytest.raises(ValidationError, match=r"distances: got weight 2.0 .*kind perceptual, which has no effect"):
        classes(folder, distances=[perceptual | {"weight": 2}])
    missing = classes(folder, distances=[perceptual | {"kind": "frechet"}])
    with pytest.raises(ConfigError, match=r"evaluation\[0\].distances\[0\]: network.folder: "):
        prepare([missing], with_decoder())


def test_a_decoder_of_nan_is_named(folder):
    model = with_decoder()
    model.image.pixels.layers.into.weight.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="pixels: 4 of 4 images have NaN"):
        evaluate(model, [classes(folder)])


def stored_image(content):
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).copy()).permute(2, 0, 1)


@pytest.mark.parametrize(("detail", "ways"), [(None, 3), (DETAIL, 5)])
def test_details_show_images_beside_what_their_ids_decode_to(folder, detail, ways):
    model, real = with_decoder(detail=detail), originals()
    [result] = evaluate(model, [classes(folder)], details=DetailsConfig(reconstructions=3))
    for index, card in zip([0, 7, 14], result.details.reconstructions.cards, strict=True):
        original, (first, *decoded) = real[index], card.items
        assert stored_image(first.image).equal(original)
        bits = [24, 24, 48, 64, 80][:ways]
        assert [each.note.partition(",")[0] for each in decoded] == [f"{size} bits" for size in bits]
        made = model.image.decode_pixels(model.image.encode_pixels(original[None]))
        assert (stored_image(decoded[-1].image).float() - 255 * made[0]).abs().max() <= 0.51
        assert f"{float(compare_images(made, original[None])['psnr']):.1f} dB" in decoded[-1].note
    [result] = evaluate(model, [captions(folder)], details=DetailsConfig(reconstructions=0))
    assert result.details.reconstructions is None
