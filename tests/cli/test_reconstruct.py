"""``vqclip reconstruct``: a page of images beside what their ids decode to."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.models import FSQ, IDENTITY, RESIDUAL_FSQ, tiny_model
from tests.report.test_hostile import EVIL, require_harmless
from tests.search.making import pictures
from vqclip.evaluation.reconstructions import choose_images
from vqclip.pixels import PixelsConfig, attach

main = command("reconstruct")


def tokenizer(folder, quantizer=RESIDUAL_FSQ, image_size=16, detail=None):
    """A tokenizer of 4 tokens with a pixel decoder, saved."""
    torch.manual_seed(0)
    image = tiny_model(quantizer, FSQ).build().eval().image
    decoder = {"kind": "convolutional", "channels": 8, "max_channels": 8}
    config = PixelsConfig.model_validate({"decoder": decoder, "image_size": image_size, "detail": detail})
    attach(image, config.build(image.quantizer.dim, 4).eval())
    image.save_pretrained(folder)
    return image


@pytest.fixture
def page(tmp_path):
    """A function that runs the command on 12 images and returns the page."""
    image, source = tokenizer(tmp_path / "tokenizer"), pictures(tmp_path / "images")

    def run(*options: str) -> str:
        output = tmp_path / "page.html"
        given = [str(tmp_path / "tokenizer"), "--data", str(source), "-o", str(output), *options]
        assert main(given) == 0
        return output.read_text()

    run.tokenizer, run.source = image, source
    return run


def shown(text):
    """The images of a page, `(H, W, 3)` each."""
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB")) for each in found]


def test_a_page_has_originals_decoded_images_and_differences(page, capsys):
    text = page("--show", "1", "--batch-size", "5")
    images, stages = shown(text), 3
    each = 1 + 2 * stages + 2
    assert len(images) == 3 * each  # worst, median, best
    found = require_harmless(text)
    assert "Worst by the PSNR of all ids" in found.text
    assert "1 of 3 stages" in found.text
    assert found.text.count("WebP, smallest file") == 3
    assert "ids all ids, images below WebP, images below" in found.text  # legend of the curve
    for first in range(0, len(images), each):
        original = torch.from_numpy(images[first].copy()).permute(2, 0, 1)[None]
        ids = page.tokenizer.encode(original)
        for stage in range(stages):
            decoded, difference = images[first + 1 + 2 * stage], images[first + 2 + 2 * stage]
            expected = page.tokenizer.decode_pixels(ids, stages=stage + 1)
            assert np.abs(decoded - (255 * expected[0]).round().byte().permute(1, 2, 0).numpy().astype(int)).max() <= 1
            errors = np.abs(decoded.astype(float) - images[first]).mean(axis=2)
            assert np.abs(difference[..., 0] - np.minimum(255, 4 * errors)).max() <= 0.51
    assert "12 images, 72 bits an image, PSNR " in capsys.readouterr().out


def test_the_worst_median_and_best_images_are_chosen():
    psnr = torch.tensor([5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0])
    assert choose_images(psnr, 2) == {"Worst": [1, 5], "Median": [3, 0], "Best": [2, 6]}
    assert choose_images(psnr, 3) == {"All images, worst first": [1, 5, 3, 0, 4, 6, 2]}


def test_groups_are_sorted_by_psnr_and_the_table_has_the_mean(page):
    text = require_harmless(page("--show", "4")).text
    assert "All images, worst first" in text
    rates = [float(rate) for rate in re.findall(r"3 of 3 stages 72 bits (\d+\.\d) dB", text)]
    assert len(rates) == 12
    assert "ids WebP decoded from" in text  # legend of the curve
    assert rates == sorted(rates)
    (mean,) = re.findall(r"3 of 3 stages 72 (\d+\.\d\d) ", text)
    assert abs(float(mean) - sum(rates) / 12) < 0.1


def test_the_seed_draws_the_images(page):
    first = page("--images", "3", "--force")
    assert first == page("--images", "3", "--force")
    originals = [shown(text)[::9] for text in (first, page("--images", "3", "--force", "--seed", "1"))]
    assert not all(map(np.array_equal, *originals))
    assert len(originals[0]) == 3


def test_other_sizes_of_decoder_and_page(tmp_path):
    tokenizer(tmp_path / "tokenizer", image_size=32)
    source, output = pictures(tmp_path / "images"), tmp_path / "page.html"
    given = [str(tmp_path / "tokenizer"), "--data", str(source), "-o", str(output), "--images", "2"]
    assert main(given) == 0
    assert {image.shape for image in shown(output.read_text())} == {(32, 32, 3)}
    assert main([*given, "--force", "--side", "16"]) == 0
    assert {image.shape for image in shown(output.read_text())} == {(16, 16, 3)}


def test_detail_stages_follow_all_ids(tmp_path):
    detail = {"quantizer": FSQ, "stages": 2, "channels": 8, "max_channels": 8}
    image, source = tokenizer(tmp_path / "tokenizer", FSQ, detail=detail), pictures(tmp_path / "images")
    output = tmp_path / "page.html"
    assert main([str(tmp_path / "tokenizer"), "--data", str(source), "-o", str(output), "--images", "1"]) == 0
    text, images = require_harmless(output.read_text()).text, shown(output.read_text())
    for label, bits in (("all ids", 24), ("all ids, 1 of 2 detail stages", 48), ("all ids, 2 of 2 detail stages", 72)):
        assert f"{label} {bits} bits" in text
    original = torch.from_numpy(images[0].copy()).permute(2, 0, 1)[None]
    ids = image.encode_pixels(original)
    for stages in range(3):
        expected = (255 * image.decode_pixels(ids, detail=stages)[0]).round().permute(1, 2, 0).numpy()
        assert np.abs(images[1 + 2 * stages].astype(float) - expected).max() <= 1


def test_an_existing_page_is_kept_without_force(page, capsys):
    page()
    with pytest.raises(AssertionError):
        page()
    assert "page.html exists; name another file, or add --force to replace it" in capsys.readouterr().err


def test_hostile_captions_stay_texts(tmp_path, page):
    table = tmp_path / "table.csv"
    quoted = EVIL.replace('"', '""')
    rows = [f'{path},"{quoted}"' for path in sorted(page.source.rglob("[!.]*.png"))[:3]]
    table.write_text("\n".join(["filepath,title", *rows]) + "\n")
    output = tmp_path / "other.html"
    assert main([str(tmp_path / "tokenizer"), "--data", str(table), "-o", str(output)]) == 0
    assert require_harmless(output.read_text()).text.count("<script>x0x()</script>") == 3


def test_unusable_images_are_left_out_and_counted(page, capsys):
    (page.source / "03a.png").write_bytes(b"no image")
    with pytest.raises(AssertionError):
        page()
    assert "1 of 13 evaluation samples cannot be used" in capsys.readouterr().err
    text = require_harmless(page("--bad-fraction", "0.1")).text
    assert "12 images of" in text
    assert "1 images cannot be used and are left out" in text


@pytest.mark.parametrize(
    ("quantizer", "decoder", "expected"),
    [(FSQ, False, "has no pixel decoder; expected"), (IDENTITY, True, "the image quantizer has no codes (Identity)")],
)
def test_tokenizers_that_cannot_be_shown(tmp_path, capsys, quantizer, decoder, expected):
    image = tokenizer(tmp_path / "with", quantizer)
    image.pixels = image.pixels if decoder else None
    image.save_pretrained(tmp_path / "tokenizer")
    source, output = pictures(tmp_path / "images"), tmp_path / "page.html"
    assert main([str(tmp_path / "tokenizer"), "--data", str(source), "-o", str(output)]) == 2
    assert expected in capsys.readouterr().err
    assert not output.exists()


def test_weights_that_decode_to_nan(tmp_path, page, capsys):
    with torch.no_grad():
        next(page.tokenizer.pixels.parameters()).fill_(1e38)
    page.tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(AssertionError):
        page()
    assert "have NaN or infinite pixels" in capsys.readouterr().err
