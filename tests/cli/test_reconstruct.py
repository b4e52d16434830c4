"""``vqclip reconstruct``: image files of what ids decode to, and a page of them beside their originals."""

import base64
import io
import os
import re
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.models import FSQ, IDENTITY, RESIDUAL_FSQ, tiny_model
from tests.report.test_hostile import EVIL, require_harmless
from tests.search.making import pictures
from vqclip.evaluation.reconstructions import BEGUN_FILE, choose_images
from vqclip.io import atomic
from vqclip.pixels import PixelsConfig, attach
from vqclip.tokenizer import ImageTokenizer
from vqclip.tokenizer.loading import load_tokenizer

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
    rates = [float(rate) for rate in re.findall(r"3 of 3 stages 72 bits, (\d+\.\d) dB", text)]
    assert len(rates) == 12
    assert "ids WebP decoded from" in text  # legend of the curve
    assert rates == sorted(rates)
    (mean,) = re.findall(r"3 of 3 stages 72 (\d+\.\d\d) ", text)
    assert abs(float(mean) - sum(rates) / 12) < 0.1


def test_other_sizes_of_decoder_and_page(tmp_path):
    tokenizer(tmp_path / "tokenizer", image_size=32)
    source, output = pictures(tmp_path / "images"), tmp_path / "page.html"
    given = [str(tmp_path / "tokenizer"), "--data", str(source), "-o", str(output), "--limit", "2"]
    assert main(given) == 0
    assert {image.shape for image in shown(output.read_text())} == {(32, 32, 3)}
    assert main([*given, "--side", "16"]) == 0
    assert {image.shape for image in shown(output.read_text())} == {(16, 16, 3)}


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
        page("--bad-fraction", "0")
    assert "1 samples cannot be used; max_bad_fraction of an evaluation" in capsys.readouterr().err
    text = require_harmless(page()).text
    assert "12 images of" in text
    assert "1 images cannot be used and are left out" in text


@pytest.mark.parametrize(
    ("quantizer", "decoder", "expected"),
    [(FSQ, False, "has no pixel decoder; expected"), (IDENTITY, True, "the image quantizer has no codes (Identity)")],
)
def test_tokenizers_that_cannot_be_shown(tmp_path, refused, quantizer, decoder, expected):
    image = tokenizer(tmp_path / "with", quantizer)
    image.pixels = image.pixels if decoder else None
    image.save_pretrained(tmp_path / "tokenizer")
    source, output = pictures(tmp_path / "images"), tmp_path / "page.html"
    assert expected in refused(main([str(tmp_path / "tokenizer"), "--data", str(source), "-o", str(output)]))
    assert not output.exists()


def test_weights_that_decode_to_nan(tmp_path, page, capsys):
    with torch.no_grad():
        next(page.tokenizer.pixels.parameters()).fill_(1e38)
    page.tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(AssertionError):
        page()
    assert "have NaN or infinite pixels" in capsys.readouterr().err


@pytest.fixture
def folders(tmp_path):
    """A tokenizer folder, and one of images: 12 of 30 x 20 pixels, a square one, and one that is no image."""
    tokenizer(tmp_path / "tokenizer")
    images = pictures(tmp_path / "images")
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(images / "square.png")
    (images / "list.txt").write_text("no image")
    return tmp_path


def write(folders, *options: str, out: str = "out") -> int:
    images, output = ["--images", str(folders / "images")], ["--out", str(folders / out)]
    return main([str(folders / "tokenizer"), *images, *output, *options])


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_image_is_written_under_its_name_at_its_own_size(folders, capsys):
    images, out = folders / "images", folders / "out"
    Image.open(images / "square.png").save(images / "below" / "photo.JPG", quality=90)
    Image.open(images / "00.png").convert("L").resize((7, 150)).save(images / "narrow.bmp")
    assert write(folders, "--batch-size", "4") == 0
    assert f"{out}: 15 images written, 0 were there before" in capsys.readouterr().out
    found = {name: Image.open(io.BytesIO(data)) for name, data in files_in(out).items() if name != BEGUN_FILE}
    assert found.keys() == files_in(images).keys() - {"list.txt", ".hidden.png"}
    for name, image in found.items():
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", Image.open(images / name).size)
    image = load_tokenizer(folders / "tokenizer", "image")
    square = torch.from_numpy(np.array(Image.open(images / "square.png"))).permute(2, 0, 1)[None]
    expected = (255 * image.decode_pixels(image.encode(square))[0]).round().permute(1, 2, 0).numpy()
    assert np.abs(np.array(found["square.png"]) - expected).max() <= 1


@pytest.mark.parametrize("size", [(40, 64), (64, 63)])
def test_nothing_moves_and_no_white_comes_in(folders, size, monkeypatch):
    """With a decoder that gives back the square, twice as large, the image is the same but for its resolution."""
    across, down = np.meshgrid(np.linspace(0, 200, size[1]), np.linspace(0, 100, size[0]))
    original = np.stack([across, down, across + down * 0], axis=2).round().astype(np.uint8)
    shutil.rmtree(folders / "images")
    (folders / "images").mkdir()
    Image.fromarray(original).save(folders / "images" / "slope.png")
    tokenizer(folders / "tokenizer", image_size=32)
    seen = []
    monkeypatch.setattr(ImageTokenizer, "encode_pixels", lambda self, images: seen.append(images) or images)
    doubled = lambda self, ids: ids.repeat_interleave(2, 2).repeat_interleave(2, 3) / 255  # noqa: E731
    monkeypatch.setattr(ImageTokenizer, "decode_pixels", doubled)
    assert write(folders) == 0
    made = np.array(Image.open(folders / "out" / "slope.png")).astype(float)
    assert 63 in size or (seen[0][0, :, 0, -1] == 255).all()  # white beside the image
    inner = np.abs(made - original)[4:-4, 4:-4]
    assert inner.mean() < 3
    assert abs((made - original)[4:-4, 4:-4].mean()) < 0.6  # half a pixel of the square would be 3
    assert made.max() < 215


def test_a_stopped_job_goes_on_and_leaves_no_half_files(folders, monkeypatch, capsys):
    assert write(folders, out="whole") == 0
    replace, calls = os.replace, []

    def stop(*paths):
        calls.append(paths)
        if len(calls) == 11:  # the settings, and ten images; those of the subfolder come last
            raise KeyboardInterrupt
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "replace", stop)
        assert write(folders, "--batch-size", "4") == 130
    (folders / "out" / "below" / ".tmp-left.png-0").write_bytes(b"half of an image of a killed process")
    made = [name for name in files_in(folders / "out") if name.endswith(".png")]
    assert len(made) == 9
    before = {path: path.stat().st_mtime_ns for path in (folders / "out").rglob("[!.]*.png")}
    assert write(folders, "--batch-size", "4") == 0
    assert "4 images written, 9 were there before" in capsys.readouterr().out
    assert files_in(folders / "out") == files_in(folders / "whole")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    os.utime(folders / "images" / "00.png")  # a newer original is done again
    assert write(folders) == 0
    assert "1 images written, 12 were there before" in capsys.readouterr().out


def _write_on_rank(folder):
    encode, counts = ImageTokenizer.encode_pixels, []
    with mock.patch.object(ImageTokenizer, "encode_pixels", lambda self, x: counts.append(len(x)) or encode(self, x)):
        assert write(folder, "--device", "cpu", out="shared") == 0
    return sum(counts)


def test_processes_share_the_images(folders, ranks):
    assert write(folders, "--device", "cpu") == 0
    assert ranks(3, _write_on_rank, folders, init=False) == [5, 4, 4]
    assert files_in(folders / "shared") == files_in(folders / "out")


def test_folders_that_would_lose_something_are_refused(folders, capsys, refused):
    (folders / "full").mkdir()
    (folders / "full" / "thesis.png").write_bytes(b"")
    assert "expected a folder beside" in refused(write(folders, out="images/out"))
    assert "expected a folder beside" in refused(write(folders, out="."))
    assert "this command did not begin it; expected a new folder" in refused(write(folders, out="full"))
    assert write(folders) == 0
    torch.manual_seed(5)
    image = load_tokenizer(folders / "tokenizer", "image")
    torch.nn.init.normal_(next(image.pixels.parameters()))
    image.save_pretrained(folders / "tokenizer")
    assert "was begun with other settings; expected a new folder" in refused(write(folders))
    given = [str(folders / "tokenizer"), "--out", str(folders / "new")]
    for options in ([], ["--images", str(folders / "images"), "--data", "kind=scenes"]):
        assert main([*given, *options]) == 2
        assert "expected one of --images FOLDER, for image files, and --data, for a page" in capsys.readouterr().err
    assert "expected a folder of images" in refused(main([*given, "--images", str(folders / "gone")]))


def test_images_that_cannot_be_read_are_named(folders, capsys, refused):
    (folders / "images" / "below" / "torn.jpg").write_bytes(b"\xff\xd8\xff torn")
    assert "below/torn.jpg: " in refused(write(folders, "--bad-fraction", "0"))
    assert write(folders) == 0
    assert "0 images written, 13 were there before; 1 cannot be used and are left out" in capsys.readouterr().out
