from __future__ import annotations

import html
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.data.making import caption_shards, class_folder
from tests.models import FSQ, PRODUCT, RESIDUAL, tiny_model
from vqclip.cli.search import build, main
from vqclip.data.images import ImageFiles, open_images
from vqclip.errors import CheckpointError, ConfigError, DataError, ShapeError
from vqclip.io.atomic import write_text
from vqclip.search import CodeIndex, CodeSearch, FaissSearch, Packing
from vqclip.search.index import _VERSIONS
from vqclip.search.page import Hit, page
from vqclip.search.scan import _require_float32
from vqclip.search.topk import MOST_ITEMS, rank_keys, scores_and_items, top_keys


def built(quantizer=PRODUCT):
    torch.manual_seed(0)
    return tiny_model(quantizer, quantizer).build().eval()


def drawn(count=300, seed=1, tokens=4, size=64):
    """Ids of `PRODUCT`."""
    return torch.randint(0, size, (count, tokens, 2), generator=torch.Generator().manual_seed(seed))


def queries(count=5, width=16):
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(2)), dim=-1)


def reference(embeddings, asked, k):
    """The slow way: stable sorting keeps equal scores in the order of the items."""
    scores, items = (asked @ embeddings.T).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], items[:, :k]


class TestPacking:
    @pytest.mark.parametrize("absent", [False, True])
    @pytest.mark.parametrize("sizes", [(2,), (4096,) * 3, (5, 1000, 2**40, 64), (2**63,)])
    def test_ids_come_back(self, sizes, absent):
        packing = Packing(7, sizes, absent)
        rng = np.random.default_rng(0)
        columns = [rng.integers(-absent, size - 1, (33, 7), endpoint=True) for size in sizes]
        ids = torch.from_numpy(np.stack(columns, axis=-1))
        ids[0], ids[1] = torch.tensor([size - 1 for size in sizes]), -int(absent)
        codes = packing.pack(ids)
        assert codes.dtype == torch.uint8
        assert codes.shape == (33, packing.bytes)
        assert torch.equal(packing.unpack(codes), ids)

    def test_bits_are_what_the_sizes_need(self):
        assert Packing(16, (4096,) * 16, False).bits == 16 * 16 * 12
        assert Packing(16, (4096,) * 16, True).bits == 16 * 16 * 13
        assert Packing(3, (5, 8, 2), False).bits == 3 * (3 + 3 + 1)
        assert Packing(3, (5, 8, 2), False).bytes == 3

    def test_the_layout_is_stated(self):
        """Token after token, codebook after codebook, highest bit first: 101 0 | 011 1, and nothing for the rest."""
        assert Packing(2, (6, 2), False).pack(torch.tensor([[[5, 0], [3, 1]]])).tolist() == [[0b10100111]]

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            (torch.full((1, 2, 1), 6), "numbers from 6 to 6, expected 0 to one less"),
            (torch.full((1, 2, 1), -1), "numbers from -1"),
            (torch.zeros(1, 3, 1, dtype=torch.int64), r"expected \(n, 2, 1\) integers"),
            (torch.zeros(1, 2, 1), "float32"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, ids, message):
        with pytest.raises(ShapeError, match=message):
            Packing(2, (6,), False).pack(ids)

    def test_bytes_that_hold_no_id_are_refused(self):
        with pytest.raises(ShapeError, match="numbers from 7 to 7"):
            Packing(2, (6,), False).unpack(torch.tensor([[255]], dtype=torch.uint8))


class TestTopK:
    def test_order_and_ties(self):
        scores = torch.tensor([[0.5, -0.25, 0.5, -0.0, 0.0, -1.0, 1.0]])
        found, items = scores_and_items(top_keys(rank_keys(scores, torch.arange(7)), 7))
        assert items.tolist() == [[6, 0, 2, 3, 4, 1, 5]]
        assert torch.equal(found, scores[0, items[0]][None])

    def test_any_float_comes_back(self):
        scores = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-30, 30, 1000)
        found, items = scores_and_items(top_keys(rank_keys(scores, torch.arange(1000)), 1000))
        assert torch.equal(found, scores.sort(dim=1, descending=True).values)
        assert torch.equal(found, scores.gather(1, items))


@pytest.mark.parametrize("cache", ["none", "float32", "float16", "int8"])
@pytest.mark.parametrize("repeat", [False, True])
def test_search_is_exact_whatever_is_kept(cache, repeat, monkeypatch):
    monkeypatch.setattr("vqclip.search.scan._CHUNK", 70)
    monkeypatch.setattr("vqclip.search.scan._SCORES", 900)
    tokenizer, ids = built().image, drawn()
    if repeat:
        ids = ids[torch.arange(300) % 111]
    with torch.no_grad():
        embeddings = tokenizer.embed(drawn()[:111])[torch.arange(300) % 111] if repeat else tokenizer.embed(ids)
        scores, items = reference(embeddings, queries(), 10)
    found = CodeSearch(CodeIndex.build(tokenizer, ids), tokenizer, cache).search(queries(), 10)
    torch.testing.assert_close(found.scores, scores, atol=1e-6, rtol=0)
    # Scores are equal, or further apart than rounding: so the order of the items is determined.
    steps = scores[:, :-1] - scores[:, 1:]
    assert ((steps == 0) | (steps > 1e-5)).all()
    assert torch.equal(found.items, items)
    for row, (score, item) in enumerate(zip(found.scores, found.items, strict=True)):
        same = score[:-1] == score[1:]
        assert (item[:-1] < item[1:])[same].all(), row
        assert repeat == bool(same.any())


def test_equal_codes_have_equal_scores_and_are_kept_once():
    tokenizer = built().image
    ids = drawn(7)[torch.tensor([3, 0, 3, 1, 3, 0])]
    index = CodeIndex.build(tokenizer, ids)
    assert len(index) == 6
    assert len(index.codes) == 3
    assert torch.equal(index.ids(torch.arange(6)), ids)
    found = CodeSearch(index, tokenizer).search(tokenizer.embed(ids[:1]).detach(), 99)
    assert found.items[0, :3].tolist() == [0, 2, 4]
    assert found.scores[0, :3].unique().numel() == 1
    assert sorted(found.items[0].tolist()) == list(range(6))


def test_short_forms_embed_again_only_what_may_be_among_the_best(monkeypatch):
    tokenizer, ids = built().image, drawn(2000)
    search = CodeSearch(CodeIndex.build(tokenizer, ids), tokenizer, "int8")
    seen = []
    embed = tokenizer.embed
    monkeypatch.setattr(tokenizer, "embed", lambda ids: seen.append(len(ids)) or embed(ids))
    search.search(queries(1), 5)
    assert 5 <= sum(seen) < 500


def test_absent_tokens_and_stages_are_kept():
    model = built(RESIDUAL)
    text = model.text.encode(["a red star", "x", "two small blue circles on a grey background"])
    ids = model.image.encode(torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8))
    ids[2, :, 1:] = -1
    for tokenizer, each in ((model.text, text), (model.image, ids)):
        index = CodeIndex.build(tokenizer, each)
        assert torch.equal(index.ids(torch.arange(len(each))), each)
        found = CodeSearch(index, tokenizer).search(tokenizer.embed(each).detach(), 1)
        assert found.items.flatten().tolist() == list(range(len(each)))


def test_an_empty_index_finds_nothing():
    tokenizer = built().image
    for cache in ("none", "float32", "float16", "int8"):
        found = CodeSearch(CodeIndex.build(tokenizer, drawn(0)), tokenizer, cache).search(queries(), 3)
        assert found.items.shape == found.scores.shape == (5, 0)


def test_the_code_search_of_a_codebook_of_few_bits_is_small():
    tokenizer = built(FSQ).image
    index = CodeIndex.build(tokenizer, torch.arange(64)[:, None, None].expand(64, 4, 1))
    assert index.nbytes == 64 * 3
    assert CodeSearch(index, tokenizer).nbytes == 64 * 3
    assert CodeSearch(index, tokenizer, "float32").nbytes == 64 * (3 + 4 * 16)
    assert CodeSearch(index, tokenizer, "float16").nbytes == 64 * (3 + 2 * 16 + 4)
    assert CodeSearch(index, tokenizer, "int8").nbytes == 64 * (3 + 16 + 8)


@pytest.mark.parametrize(
    ("asked", "k", "message"),
    [
        (torch.zeros(16), 1, r"queries: got \(16,\) torch.float32, expected \(Q, 16\)"),
        (torch.zeros(1, 15), 1, r"\(1, 15\)"),
        (torch.full((1, 16), torch.nan), 1, "NaN"),
        (torch.zeros(1, 16), 0, "k: got 0"),
    ],
)
def test_wrong_queries_are_refused(asked, k, message):
    tokenizer = built().image
    with pytest.raises(ShapeError, match=message):
        CodeSearch(CodeIndex.build(tokenizer, drawn(3)), tokenizer).search(asked, k)


def test_another_tokenizer_is_refused():
    model = built()
    index = CodeIndex.build(model.image, drawn(3))
    with pytest.raises(CheckpointError, match="made by the image tokenizer .* got the text tokenizer"):
        CodeSearch(index, model.text)
    with pytest.raises(ConfigError, match="cache: got 'disk'"):
        CodeSearch(index, model.image, "disk")


def test_faiss_agrees():
    pytest.importorskip("faiss")
    tokenizer, ids = built().image, drawn()
    index = CodeIndex.build(tokenizer, ids)
    exact, flat = CodeSearch(index, tokenizer).search(queries(), 10), FaissSearch(index, tokenizer)
    found = flat.search(queries(), 10)
    torch.testing.assert_close(found.scores, exact.scores, atol=1e-6, rtol=0)
    assert torch.equal(found.items, exact.items)
    assert flat.nbytes >= 300 * 16 * 4
    with pytest.raises(ConfigError, match="factory: got 'Wrong'"):
        FaissSearch(index, tokenizer, "Wrong")


class TestFiles:
    NAMES = ("a red apple", "<b>", "naïve ☃", "", "bad \udcff byte")

    def saved(self, folder, repeat=True):
        tokenizer = built().image
        ids = drawn(3)[torch.tensor([0, 1, 0, 2, 1])] if repeat else drawn(5)
        index = CodeIndex.build(tokenizer, ids, self.NAMES, places=torch.tensor([0, 2, 3, 5, 8]))
        index.save(folder)
        return tokenizer, index

    @pytest.mark.parametrize("repeat", [False, True])
    def test_what_is_saved_is_loaded(self, tmp_path, repeat):
        tokenizer, index = self.saved(tmp_path / "index", repeat)
        loaded = CodeIndex.load(tmp_path / "index")
        assert list(loaded.names) == list(self.NAMES)
        assert torch.equal(loaded.codes, index.codes)
        assert torch.equal(loaded.places, index.places)
        assert (loaded.row is None) == (not repeat)
        a, b = (CodeSearch(each, tokenizer).search(queries(), 3) for each in (index, loaded))
        assert torch.equal(a.scores, b.scores)
        assert torch.equal(a.items, b.items)
        assert {path.name for path in (tmp_path / "index").iterdir()} == {"index.json", "codes.safetensors"}

    def test_an_index_without_items_is_loaded(self, tmp_path):
        CodeIndex.build(built().image, drawn(0)).save(tmp_path / "index")
        assert len(CodeIndex.load(tmp_path / "index")) == 0

    @pytest.mark.parametrize("name", ["index.json", "codes.safetensors"])
    @pytest.mark.parametrize("how", ["flip", "cut", "remove"])
    def test_damage_is_noticed(self, tmp_path, name, how):
        self.saved(tmp_path / "index")
        path = tmp_path / "index" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.unlink() if how == "remove" else path.write_bytes(data if how == "flip" else data[:-9])
        with pytest.raises(CheckpointError, match=name):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"row": torch.tensor([0, 1, 0, 3, 1], dtype=torch.int32)}, "row: numbers outside the 3 codes"),
            ({"row": torch.tensor([0, 1, 0, 2, 1])}, r"row: got \(5,\) torch.int64"),
            ({"extra": torch.zeros(1)}, "unexpected extra"),
            ({"codes": torch.zeros(3, 5, dtype=torch.uint8)}, r"codes: got \(3, 5\)"),
            ({"places": torch.tensor([0, 1, -1, 2, 3])}, "places: got -1, expected 0 or more"),
            ({"name_ends": torch.tensor([9, 3, 3, 3, 3])}, "name_ends: not in order"),
            ({"name_ends": torch.tensor([1, 2, 3, 4, 500])}, "name_ends: not in order"),
        ],
    )
    def test_an_honest_hash_of_nonsense_is_refused(self, tmp_path, change, message, monkeypatch):
        """Whoever makes a file can make its hash, too."""
        from safetensors.torch import save_file

        monkeypatch.setattr(
            "vqclip.search.index.save_tensors", lambda tensors, path: save_file({**tensors, **change}, path)
        )
        self.saved(tmp_path / "index")
        with pytest.raises(CheckpointError, match=message):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize("sizes", [(0, 64), (64, -1), (2**63 + 1,), (2,) * (2**16 + 1)])
    def test_codebooks_that_cannot_be_are_refused(self, tmp_path, sizes, monkeypatch):
        from vqclip.search import index

        header = index._Header

        def forged(codebook_sizes, **facts):
            return header.model_construct(codebook_sizes=sizes, **facts)

        with monkeypatch.context() as patch:
            patch.setattr(index, "_Header", forged)
            self.saved(tmp_path / "index")
        with pytest.raises(CheckpointError, match=r"index.json: codebook_sizes"):
            CodeIndex.load(tmp_path / "index")

    @pytest.mark.parametrize("path", ["https://example.org/pictures", "owner/name", "/tmp/s3://bucket"])
    def test_nothing_is_fetched_because_an_index_says_so(self, tmp_path, path, monkeypatch):
        from vqclip.search.index import Origin

        with pytest.raises(ValueError, match="expected an absolute path"):
            Origin(pictures=path)
        tokenizer, _ = self.saved(tmp_path / "index")
        CodeIndex.build(tokenizer, drawn(3), origin=Origin.model_construct(tokenizer=path)).save(tmp_path / "index")
        with pytest.raises(CheckpointError, match="origin.tokenizer: .*expected an absolute path"):
            CodeIndex.load(tmp_path / "index")

    def test_other_folders_are_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(ConfigError, match="contains no index.json but thesis.tex"):
            self.saved(tmp_path)
        self.saved(tmp_path / "index")
        self.saved(tmp_path / "index")
        assert (tmp_path / "thesis.tex").exists()


def pictures(folder: Path, count=12) -> Path:
    rng = np.random.default_rng(0)
    (folder / "below").mkdir(parents=True)
    for number in range(count):
        name = f"below/<i>{number}_&.png" if number % 2 else f"{number:02d}.png"
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / name)
    (folder / ".hidden.png").write_bytes(b"")
    return folder


def test_a_folder_of_pictures_is_a_source(tmp_path):
    source = ImageFiles(pictures(tmp_path))
    assert len(source) == 12
    assert [str(path) for path in source.files] == sorted(str(path) for path in source.files)
    assert source.read(11).captions == ("<i>9 &",)
    with pytest.raises(DataError, match="no image"):
        ImageFiles(tmp_path / "none")


def test_pictures_that_cannot_be_read_are_left_out_and_counted(tmp_path):
    (pictures(tmp_path) / "03a.png").write_bytes(b"no picture")
    source, tokenizer = ImageFiles(tmp_path), built().image
    with pytest.raises(DataError, match="1 of 13"):
        build(tokenizer, source)
    index = build(tokenizer, source, batch_size=5, bad_fraction=0.1)
    bad = [path.name for path in source.files].index("03a.png")
    assert index.places.tolist() == [place for place in range(13) if place != bad]


@pytest.fixture
def shown(tmp_path, capsys):
    """The page that the two commands make, and what they print."""
    built().save_pretrained(tmp_path / "tokenizer")
    given = ["--tokenizer", str(tmp_path / "tokenizer")]
    images, index, target = pictures(tmp_path / "pictures"), str(tmp_path / "index"), tmp_path / "page.html"
    assert main(["build", *given, "--images", str(images), "--out", index]) == 0
    assert (
        main(["query", "--index", index, "a <red> apple", "-k", "5", "--images", str(images), "--html", str(target)])
        == 0
    )
    return target, capsys.readouterr().out


def test_the_commands_make_a_page(shown):
    target, printed = shown
    text = target.read_text(encoding="utf-8")
    assert "12 items of 48 bits, 12 of them distinct; 72 bytes, 6.0 an item; float32 embeddings: 64 an item" in printed
    assert text.count("data:image/png;base64,") == 5
    assert "<h1>a &lt;red&gt; apple</h1>" in text
    assert "<i>" not in text
    assert "<script" not in text


def test_pictures_that_changed_are_not_shown(tmp_path, shown, capsys):
    Image.new("RGB", (9, 9)).save(tmp_path / "pictures" / "new.png")
    given, here = ["--index", str(tmp_path / "index")], ["--images", str(tmp_path / "pictures")]
    assert main(["query", *given, "x", *here, "--html", str(tmp_path / "other.html")]) == 2
    assert (
        "the index was built from other data; expected the same images, or a rebuilt index" in capsys.readouterr().err
    )
    picture = str(tmp_path / "pictures" / "00.png")
    assert main(["query", *given, "--image", picture, "-k", "1"]) == 0
    assert capsys.readouterr().out.split()[2] == "00.png"  # a picture finds itself
    (tmp_path / "pictures" / "new.png").unlink()
    moved = (tmp_path / "pictures").rename(tmp_path / "moved")
    assert main(["query", *given, "x", "--images", str(moved), "--html", str(tmp_path / "other.html")]) == 0
    assert main(["query", *given]) == 2
    assert "expected one of them" in capsys.readouterr().err


def test_no_picture_is_read_because_an_index_says_so(tmp_path, shown, capsys):
    assert main(["query", "--index", str(tmp_path / "index"), "x", "--html", str(tmp_path / "other.html")]) == 2
    message = f"--images: missing, expected the images for --html; the index was built from {tmp_path / 'pictures'}"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "other.html").exists()


def test_places_beyond_the_pictures_are_refused(tmp_path, shown, capsys):
    index = CodeIndex.load(tmp_path / "index")
    replace(index, places=torch.arange(12) + 10**9).save(tmp_path / "index")
    given = ["--images", str(tmp_path / "pictures"), "--html", str(tmp_path / "other.html")]
    assert main(["query", "--index", str(tmp_path / "index"), "x", *given]) == 2
    assert "expected less than 12, the images of" in capsys.readouterr().err


def test_one_unreadable_picture_does_not_hide_the_others(tmp_path, shown, capsys):
    path = tmp_path / "pictures" / "04.png"
    path.write_bytes(bytes(path.stat().st_size))  # of the size that the index knows
    given = ["--images", str(tmp_path / "pictures"), "--html", str(tmp_path / "other.html"), "-k", "12"]
    assert main(["query", "--index", str(tmp_path / "index"), "x", *given]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"vqclip search: left out of the page: {path}: not a JPEG, PNG or WebP image")
    text = (tmp_path / "other.html").read_text()
    assert text.count("data:image/png;base64,") == 11
    assert text.count('<span class="none">cannot be shown</span>04.png') == 1


def test_names_tell_pictures_apart(tmp_path):
    for name in ("a/cat.png", "b/cat.jpg"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "pictures" / name)
    for folder in ("x", "y"):
        caption_shards(tmp_path / "shards" / folder, counts=(2,))
    class_folder(tmp_path / "classes")
    model = built()
    assert build(model.image, ImageFiles(tmp_path / "pictures")).names == ["a/cat.png", "b/cat.jpg"]
    shards = open_images(str(tmp_path / "shards" / "*" / "*.tar"))
    captions = [shards.read(number).captions[0] for number in range(4)]
    places = [f"{folder}/00000.tar/{number:09d}" for folder in "xy" for number in range(2)]
    expected = [f"{place}: {caption}" for place, caption in zip(places, captions, strict=True)]
    assert build(model.image, shards).names == build(model.text, shards).names == expected
    labelled = build(model.image, open_images(str(tmp_path / "classes")))
    assert labelled.names[5] == "0.tar/s0000005: red panda"
    assert len(set(labelled.names)) == len(labelled)


def test_an_index_of_the_former_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(_VERSIONS, "format_version", 1)
    CodeIndex.build(built().image, drawn(3)).save(tmp_path / "index")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format_version is 1, .*; build the index again \(`vqclip search"):
        CodeIndex.load(tmp_path / "index")


def test_pages_escape_all_text():
    evil = "\"><script>alert('x')</script>"
    text = page(evil, [Hit(evil, 0.5), Hit(evil, 0.4, torch.zeros(3, 9, 9, dtype=torch.uint8))], evil)
    assert "<script" not in text
    assert text.count(html.escape(evil)) == 6


def test_tf32_is_refused_on_cuda():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        _require_float32(torch.device("cpu"))
        with pytest.raises(ConfigError, match="got float32 matrix products in tf32, expected ieee"):
            _require_float32(torch.device("cuda"))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_items_are_no_more_than_int32_counts():
    assert torch.iinfo(torch.int32).max == MOST_ITEMS


def test_names_that_are_no_utf_8_are_spelt_out(tmp_path):
    name = os.fsdecode(b"caf\xe9\x1b[2J\n")
    text = page(name, [Hit(name, 0.5)], name)
    assert text.count(r"caf\udce9\x1b[2J\n") == 4
    write_text(tmp_path / "page.html", text)


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_browser_shows_the_pictures(shown, tmp_path):
    """python -m pytest -m slow tests/search: the colours of the pictures are on the screen."""
    tmp, target = tmp_path / "shot.png", shown[0]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet, f"--screenshot={tmp}"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,600", target.as_uri()]
    subprocess.run([CHROMIUM, *options], check=True, timeout=120, capture_output=True)
    pixels = np.asarray(Image.open(tmp).convert("RGB")).astype(int)
    colourful = (pixels.max(-1) - pixels.min(-1)) > 60
    assert colourful.mean() > 0.05
