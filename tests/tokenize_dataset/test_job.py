import json
import os
import signal
import tarfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import command
from tests.data.making import NOT_UTF8, encode, make_files, pixels, write_tar
from tests.models import IDENTITY, WIDE_LFQ, put_on_the_border
from tests.tokenize_dataset.making import BATCH, COUNTS, hashes, run, shards, tokenizer_folder
from vqclip import load_tokenizer
from vqclip.data import CaptionShardsConfig, TokenDataset, decode_image, parse_source
from vqclip.data.work_folder import WorkFolder
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.model import CLIP
from vqclip.tokenizer.folder import TokenizerFolder
from vqclip.tokenizer.loading import load_whole
from vqclip.tokenizer.saving import write_config
from vqclip.tokenizer.stored import fingerprint

main = command("tokenize")

LFQ_LARGE = {"kind": "lfq", "bits": 20}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return tokenizer_folder(tmp_path / "tokenizer")


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_with_the_ids_that_encode_gives(tmp_path: Path, workers: int) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", text=LFQ_LARGE)
    source = CaptionShardsConfig(path=str(shards(tmp_path / "in")))
    done = run(tokenizer, source, tmp_path / "out", workers=workers)
    assert (done.made, done.samples, done.manifest.samples) == (len(COUNTS), sum(COUNTS), sum(COUNTS))

    data, read = TokenDataset(tmp_path / "out"), source.build()
    image, text = load_tokenizer(tokenizer, "image"), load_tokenizer(tokenizer, "text")
    assert data.tokenizer_sha256 == {"image": fingerprint(image), "text": fingerprint(text)}
    assert [item.sample_id for item in data] == list(range(sum(COUNTS)))
    assert (data.record(0).image.dtype, data.record(0).texts[0].dtype) == (np.uint8, np.uint32)
    for item in data:
        raw = read.read(item.sample_id)
        assert (item.key, item.caption, item.label) == (f"{item.sample_id:09d}", raw.captions[0], -1)
        assert torch.equal(item.text_ids, text.encode([item.caption])[0])
        assert torch.equal(item.image_ids, image.encode(image.transform(decode_image(raw.image))[None])[0])
    assert len({tuple(item.image_ids.flatten().tolist()) for item in data}) > 10
    assert (data[0].text_ids < 0).any()


def test_names_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tar, its members, the class folder, and every folder on the way; what is written is UTF-8, and read."""
    home = tmp_path / NOT_UTF8
    monkeypatch.setenv("VQCLIP_CACHE", str(home / "cache"))
    tokenizer = tokenizer_folder(home / "tokenizer")
    names = [os.fsdecode(name) for name in (b"im\xe9", b"im\xe8", b"bad\xff")]
    images = {f"{name}.jpg": encode(pixels(number)) for number, name in enumerate(names[:2])} | {f"{names[2]}.jpg": b""}
    members = sorted((images | {f"{name}.txt": b"a dog" for name in names}).items())
    tar = write_tar(home / f"{NOT_UTF8}.tar", dict(members), tarfile.PAX_FORMAT)
    labelled = make_files(home / "classes", f"{NOT_UTF8}/{NOT_UTF8}.jpg dog/0.jpg", encode(pixels(1)))
    for path, expected in (
        (tar, [("im\\xe8", "a dog", -1), ("im\\xe9", "a dog", -1)]),
        (labelled, [("000000000", "a photo of a café", 0), ("000000001", "a photo of a dog", 1)]),
    ):
        source, out = parse_source(str(path)), home / f"out {path.stem}"
        for made in (1, 0):  # the second time it is all there
            assert run(tokenizer, source, out, workers=0, tolerance=0.5).made == made
        data = TokenDataset(out)
        assert [(item.key, item.caption, item.label) for item in data] == expected
        for file in out.rglob("*.json*"):
            assert "\\ud" not in file.read_text("utf-8").replace("\\\\ud", "")  # half characters, that others refuse
    bad = json.loads((home / f"out {tar.stem}" / "bad_samples.jsonl").read_text())
    assert bad["key"] == "bad\\xff"


def test_float64_gives_the_same_ids_in_every_batch_size(tmp_path: Path) -> None:
    """Features lie on a border, so in float32 other batch sizes give other ids."""
    model = CLIP.from_pretrained(tokenizer_folder(tmp_path / "first", WIDE_LFQ, WIDE_LFQ))
    source = CaptionShardsConfig(path=str(shards(tmp_path / "in")))
    raw = [source.build().read(index) for index in range(sum(COUNTS))]
    pixels = torch.stack([model.image.transform(decode_image(each.image)) for each in raw])
    tokens = model.text.preprocess([each.captions[0] for each in raw])
    put_on_the_border(model.image, pixels)
    put_on_the_border(model.text, tokens)
    model.save_pretrained(tmp_path / "tokenizer")
    facts = fingerprint(model.image)
    model.double()
    expected = model.image.encode(pixels), model.text.encode(tokens)

    def ids(precision: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = tmp_path / f"{precision}{size}"
        run(str(tmp_path / "tokenizer"), source, out, batch_size=size, precision=precision)
        data = TokenDataset(out)
        assert data.tokenizer_sha256["image"] == facts
        return torch.stack([item.image_ids for item in data]), torch.stack([item.text_ids for item in data])

    for size in (1, 3, 8):
        assert all(map(torch.equal, ids("fp64", size), expected))
    assert not any(map(torch.equal, ids("fp32", 1), expected))


def test_half_precision_is_what_autocast_gives(tmp_path: Path, tokenizer: str) -> None:
    source = CaptionShardsConfig(path=str(shards(tmp_path / "in", (BATCH,))))
    done = run(tokenizer, source, tmp_path / "out", precision="bf16")
    assert done.manifest.settings["precision"] == "bf16"
    image, raw = load_tokenizer(tokenizer, "image"), [source.build().read(index) for index in range(BATCH)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = image(torch.stack([image.transform(decode_image(each.image)) for each in raw])).ids
    assert torch.equal(torch.stack([item.image_ids for item in TokenDataset(tmp_path / "out")]), expected)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_one_modality(tmp_path: Path, tokenizer: str, modality: str) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    shards(tmp_path / "in", (5,))
    run(tokenizer, tmp_path / "in", both)
    run(tokenizer, tmp_path / "in", one, modality=modality)
    for whole, part in zip(TokenDataset(both), TokenDataset(one), strict=True):
        other = "text" if modality == "image" else "image"
        assert getattr(part, f"{other}_ids") is None
        assert torch.equal(getattr(part, f"{modality}_ids"), getattr(whole, f"{modality}_ids"))
        assert part.caption == whole.caption


def test_images_of_a_folder_need_no_captions(tmp_path: Path, tokenizer: str) -> None:
    image = encode(pixels(1), "PNG")
    (make_files(tmp_path / "in", "c.PNG", image) / "a b.png").write_bytes(image)
    given = ["--tokenizer", tokenizer, "--data", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(given) == 1  # the text has none
    assert main([*given, "--modality", "image"]) == 0
    assert [item.caption for item in TokenDataset(tmp_path / "out")] == ["a b", "c"]


def test_batches_have_one_shape(tmp_path: Path, tokenizer: str) -> None:
    from vqclip.tokenizer import ImageTokenizer, TextTokenizer

    shapes = set()
    encode = {kind: kind.encode for kind in (ImageTokenizer, TextTokenizer)}

    def recording(self, inputs, precision):
        shapes.add((self.modality, *inputs.shape))
        return encode[type(self)](self, inputs, precision)

    with mock.patch.object(ImageTokenizer, "encode", recording), mock.patch.object(TextTokenizer, "encode", recording):
        run(tokenizer, shards(tmp_path / "in"), tmp_path / "out")
    assert shapes == {("image", BATCH, 3, 16, 16), ("text", BATCH, 12)}


def tokenize_here(tokenizer: str, source: str, out: str, cache: str) -> int:
    os.environ["VQCLIP_CACHE"] = cache
    return run(tokenizer, Path(source), Path(out)).made


def test_two_processes_and_a_killed_one_write_the_same(tmp_path: Path, tokenizer: str, ranks, cache: Path) -> None:
    shards(tmp_path / "in", damaged=(5,))
    run(tokenizer, tmp_path / "in", tmp_path / "one", tolerance=0.1)
    expected = hashes(tmp_path / "one")
    assert len(expected) == 2 * len(COUNTS) + 3

    killed = tmp_path / "killed"
    child = os.fork()
    if not child:  # writes a shard, and half of another one
        from vqclip.tokenize_dataset import job as module

        write = module.write_shard

        def stuck(file, *given):
            write(file, *given)
            if list((killed / "records").glob("*.json")):
                file.truncate(100)
                (tmp_path / "stuck").touch()
                time.sleep(600)

        module.write_shard = stuck
        run(tokenizer, tmp_path / "in", killed, tolerance=0.1)
        os._exit(1)
    end = time.monotonic() + 60
    while not (tmp_path / "stuck").exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(killed.glob(".tmp-*"))
    with pytest.raises(DataError, match=r"not finished \(1 shards are\); run the same"):
        TokenDataset(killed)
    done = run(tokenizer, tmp_path / "in", killed, tolerance=0.1)
    assert (done.made, done.found) == (len(COUNTS) - 1, 1)
    assert hashes(killed) == expected

    shards(tmp_path / "in")  # without a bad sample, as the ranks take the default tolerance
    run(tokenizer, tmp_path / "in", tmp_path / "again")
    arguments = [tokenizer, *(str(tmp_path / name) for name in ("in", "two")), str(cache)]
    assert sum(ranks(2, tokenize_here, *arguments, init=False)) == len(COUNTS)
    assert hashes(tmp_path / "two") == hashes(tmp_path / "again")


def test_another_tokenizer_or_setting_is_refused_with_the_difference(tmp_path: Path, tokenizer: str) -> None:
    shards(tmp_path / "in")
    out = tmp_path / "out"
    run(tokenizer, tmp_path / "in", out)
    expected = hashes(out)
    other = tokenizer_folder(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"other settings[^?]*\n  tokenizer.image: .\w{64}. there, .\w{64}. now"):
        run(other, tmp_path / "in", out)
    with pytest.raises(ConfigError, match="\n  batch_size: 4 there, 5 now$"):
        run(tokenizer, tmp_path / "in", out, batch_size=5)
    with pytest.raises(ConfigError, match="\n  text.num_tokens: 12 there, absent now"):
        run(tokenizer, tmp_path / "in", out, modality="image")
    shards(tmp_path / "in", (11, 8, 3, 8))
    with pytest.raises(ConfigError, match=r"\n  shards\[3\].samples: 9 there, 8 now"):
        run(tokenizer, tmp_path / "in", out)
    assert hashes(out) == expected


def test_bad_samples_are_left_out_counted_and_named(tmp_path: Path, tokenizer: str) -> None:
    shards(tmp_path / "in", damaged=(2, 12, 13))
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"cannot be used; --tolerance allows 2(.|\n)*0000[01].tar: sample 0000000"):
        run(tokenizer, tmp_path / "in", out, tolerance=0.002)
    assert not (out / "manifest.json").exists()
    manifest = run(tokenizer, tmp_path / "in", out, tolerance=0.1).manifest
    assert (manifest.samples, manifest.bad) == (sum(COUNTS) - 3, {"damaged image": 3})
    assert [shard.bad for shard in manifest.shards] == [{"damaged image": 1}, {"damaged image": 2}, {}, {}]
    lines = [json.loads(line) for line in (out / "bad_samples.jsonl").read_text().splitlines()]
    assert [(line["sample_id"], line["key"]) for line in lines] == [(n, f"{n:09d}") for n in (2, 12, 13)]
    assert "00000.tar: sample 000000002" in lines[0]["reason"]
    kept = [item.sample_id for item in TokenDataset(out)]
    assert kept == [n for n in range(sum(COUNTS)) if n not in (2, 12, 13)]


def test_shards_without_usable_samples_become_empty_ones(tmp_path: Path, tokenizer: str) -> None:
    shards(tmp_path / "in", (20, 2, 5), damaged=(20, 21))
    write_tar(tmp_path / "in" / "00003.tar", {})
    done = run(tokenizer, tmp_path / "in", tmp_path / "out", tolerance=0.1)
    assert [shard.samples for shard in done.manifest.shards] == [20, 0, 5, 0]
    assert [item.sample_id for item in TokenDataset(tmp_path / "out")] == [*range(20), *range(22, 27)]
    assert run(tokenizer, tmp_path / "in", tmp_path / "out", tolerance=0.1).found == 4
    with pytest.raises(DataError, match="every tar is empty; expected samples"):
        run(tokenizer, write_tar(tmp_path / "3.tar", {}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_bad_samples_of_all_processes_count_together(tmp_path: Path, tokenizer: str) -> None:
    """Each process alone is within the tolerance."""
    shards(tmp_path / "in", damaged=(2, 12))
    with mock.patch.object(WorkFolder, "claim", lambda folder, left: left[:1]):
        assert run(tokenizer, tmp_path / "in", tmp_path / "out", tolerance=0.001).missing == 3
    with pytest.raises(DataError, match="2 samples cannot be used; --tolerance allows 1"):
        run(tokenizer, tmp_path / "in", tmp_path / "out", tolerance=0.001)


def test_tokenizers_that_cannot_make_ids_are_refused(tmp_path: Path) -> None:
    shards(tmp_path / "in", (3,))
    plain = tokenizer_folder(tmp_path / "plain", image=IDENTITY)
    with pytest.raises(ConfigError, match="--tokenizer: the image quantizer has no codes"):
        run(plain, tmp_path / "in", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no such folder"):
        run(str(tmp_path / "nothing"), tmp_path / "in", tmp_path / "out")
    broken = tmp_path / "broken"
    tokenizer_folder(broken)
    weights = load_file(broken / "model.safetensors")
    weights["text.pool.position"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors")
    config = json.loads((broken / "config.json").read_text())
    write_config(broken, {name: config[name] for name in ("image", "text", "temperature")}, {})
    with pytest.raises(CheckpointError, match=r"contain NaN or infinity: text.pool.position"):
        run(str(broken), tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_is_resolved_once(tmp_path: Path, tokenizer: str) -> None:
    """A name on the hub may mean another model a moment later."""
    shards(tmp_path / "in", (3,))
    other = tokenizer_folder(tmp_path / "other", seed=1)
    with mock.patch("vqclip.tokenize_dataset.job.find_folder", side_effect=[Path(tokenizer), Path(other), Path(other)]):
        run("owner/name", tmp_path / "in", tmp_path / "out")
    made_by = {each: fingerprint(load_tokenizer(tokenizer, each)) for each in ("image", "text")}
    assert TokenDataset(tmp_path / "out").tokenizer_sha256 == made_by


def test_a_folder_that_changes_while_it_is_loaded_is_refused(tmp_path: Path, tokenizer: str) -> None:
    shards(tmp_path / "in", (3,))

    def load(opened: TokenizerFolder, modality: str) -> object:
        loaded = load_whole(opened, modality)
        if modality == "image":
            tokenizer_folder(opened.path, seed=1)
        return loaded

    refused = pytest.raises(CheckpointError, match="changed while it was loaded")
    with mock.patch("vqclip.tokenize_dataset.job.load_whole", load), refused:
        run(tokenizer, tmp_path / "in", tmp_path / "out")


def test_the_folder_of_a_run_is_that_of_its_tokenizer(tmp_path, tokenizer, capsys):
    given = ["--data", str(shards(tmp_path / "in")), "--out", str(tmp_path / "out")]
    assert main(["--tokenizer", str(Path(tokenizer).parent), *given]) == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert main(["--tokenizer", str(tmp_path / "run"), *given]) == 1
    assert "run: a run that has exported no tokenizer yet; expected a finished one" in capsys.readouterr().err
