"""The examples, on tiny data and with an untrained tokenizer: that they run, and tell what they should."""

import importlib.util
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.data.making import class_folder
from tests.evaluation.made import caption_shards, image_folder
from tests.models import PRODUCT, built, tiny_model
from tests.training import run_tree
from vqclip.errors import ConfigError, VqclipError
from vqclip.pixels import ConvolutionalPixelsConfig, attach

search = command("search")

EXAMPLES = Path(__file__).parent.parent / "examples"
CAPTIONS = ["red square", "green square: dark", "blue", "white & light"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(EXAMPLES)  # as for a program that is run from there


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Of 4 tokens of 2 codebooks of 64."""
    folder = tmp_path_factory.mktemp("run") / "tokenizer"
    built(PRODUCT).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    """Images of four colours and their captions, 24 to train with and 8 that are held out."""
    folder = tmp_path_factory.mktemp("captions")
    for split, count in (("train", 24), ("val", 8)):
        caption_shards(folder / split, [[CAPTIONS[number % 4]] for number in range(count)])
    return folder


QUICK = ("search_lancedb",)
"""Examples of a few seconds."""


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(capsys):
    """Run one: the lines that it prints."""

    def run(name, *arguments):
        module = load(name) if isinstance(name, str) else None
        (module.main if module else name)([str(each) for each in arguments])
        said = capsys.readouterr()
        # At its start a program says what it does, and how long it takes.
        assert module is None or name in QUICK or said.err.startswith(module.__doc__.partition("\n\n    ")[0])
        return said.out.splitlines()

    return run


def test_classify_tells_three_figures_and_their_differences(example, tokenizer, tmp_path):
    folder = class_folder(class_folder(tmp_path / "classes", 30, "train"), 12, "test")
    command = "classify", tokenizer, folder, "--steps", 10
    lines = example(*command)
    assert lines == example(*command)  # the seed decides everything
    assert lines[0].startswith("30 training images, 12 test images, 48 bits each")
    assert [line.split("  ")[0].split(", penalty")[0] for line in lines[1:]] == [
        "zero-shot, codes only",
        "linear probe",
        "transformer, from scratch",
        "transformer, from codebooks",
    ]
    assert all(re.search(r"[+-]\d+\.\d% \[[+-]\d+\.\d%, [+-]\d+\.\d%\]$", line) for line in lines[2:])


def test_caption_and_draw_judges_both_directions(example, tokenizer, captions):
    lines = example("caption_and_draw", tokenizer, captions, "--updates", 10)
    assert lines[0].startswith("24 training pairs, ")
    for name, line in zip(("captions", "drawings"), lines[-2:], strict=True):
        number = r"-?\d\.\d{3}"
        assert re.fullmatch(
            rf"{name}: cosine {number}, shuffled {number}, true {number}; margin over shuffled {number}, "
            rf"95 % interval {number} to {number}, n = 8",
            line,
        )


DRAW_QUICKLY = ["--scenes=24", "--judged=6", "--judge-updates=10", "--rounds=3"]
DRAW_QUICKLY += [f"--{prefix}updates=2" for prefix in ("", "depth-", "bits-")]


def test_draw_scenes_judges_real_reconstructed_and_drawn_images(example, tokenizer, tmp_path):
    model = tiny_model(PRODUCT, PRODUCT).build().eval()
    image, size = model.image, model.image.tower.image_size
    attach(image, ConvolutionalPixelsConfig(channels=8).build(image.quantizer.dim, image.num_tokens, size))
    folder, sheet = tmp_path / "pixels", tmp_path / "sheet.png"
    model.save_pretrained(folder)
    lines = example("draw_scenes", folder, *DRAW_QUICKLY, "--sheet", sheet)
    rows = [re.fullmatch(r"\| (.+?) \|" + r" \d+\.\d% \|" * 5, line) for line in lines]
    names = ["real images", "reconstructions", "drawn, masked", "drawn, depth", "drawn, bits", "chance"]
    assert [row[1] for row in rows if row] == names
    assert Image.open(sheet).size == (6 * size, 5 * size)
    with pytest.raises(ConfigError, match="sheet.png: exists"):
        example("draw_scenes", folder, *DRAW_QUICKLY, "--sheet", sheet)
    with pytest.raises(VqclipError, match="pixel decoder"):
        example("draw_scenes", tokenizer)


@pytest.mark.parametrize("kind", ["depth", "bits"])
def test_token_generators_see_earlier_tokens_alone_and_draw_four_images_by_heart(kind):
    module = load("draw_scenes")
    torch.manual_seed(0)
    vectors, text = torch.randn(2, 8, 3), torch.randn(4, 2, 5)
    ids = torch.randint(8, (4, 3, 2), generator=torch.Generator().manual_seed(0))
    head = module.build_head(kind, (8, 8), None, steps=6, width=32)
    model = module.TokenGenerator(vectors, tokens=3, text_tokens=2, text_width=5, head=head)
    given = torch.zeros(4, dtype=torch.bool)
    before, after = (model(text, given, some) for some in (ids, torch.cat([ids[:, :1], ids[:, 1:].flip(0)], dim=1)))
    torch.testing.assert_close(before[:, :2], after[:, :2])
    assert not torch.allclose(before[:, 2], after[:, 2], atol=1e-3)
    assert torch.allclose(model(text, ~given, ids)[0, 0], model(text, ~given, ids)[1, 0], atol=1e-5)
    module.train_tokens(model, text, ids, updates=150, seed=0)
    drawn = module.draw_tokens(model, text, guidance=2.0, temperature=1.0, seed=0)
    assert (drawn == ids).float().mean() > 0.7 > 0.4 > (drawn == ids.roll(1, dims=0)).float().mean()


def test_language_model_learns_and_draws_ids_that_decode(example, tokenizer, captions):
    pytest.importorskip("transformers", reason="pip install 'vqclip[examples]'")
    command = "hf_language_model", tokenizer, captions, "--steps", 30, "--images", 3
    lines = example(*command)
    assert lines[0].startswith("256 ids of its own, 133 new ones")
    first, last = map(float, re.findall(r"(\d+\.\d+) (?:nats|in)", lines[1]))
    assert last < first - 0.3
    assert sum("(4, 2) ids" in line for line in lines[2:]) == 3


def test_several_codebooks_compares_four_models(example, tokenizer, captions, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of the whole test process
    lines = example("several_codebooks", tokenizer, captions, "--seconds", 0.05, "--width", 16, "--layers", 1)
    assert lines[0].startswith("23 training images, 1 to choose when to stop, 8 of val; 4 tokens of 2 codebooks of 64")
    assert re.fullmatch(r"independent: \d+\.\d nats an image", lines[1])
    assert [line.split(":")[0] for line in lines[2:]] == ["flat", "parallel", "depth", "bits"]


@pytest.mark.parametrize("kind", ["flat", "parallel", "depth", "bits"])
def test_every_step_of_a_language_model_sees_earlier_codes_alone(kind):
    """Its loss is a -log p only then. The frequency table's is checked by hand: two of three images have code 0."""
    module = load("several_codebooks")
    torch.manual_seed(0)
    model = module.LanguageModel(kind, (4, 4), tokens=3, text_width=2, width=16, layers=1).eval()
    ids, texts = torch.randint(4, (1, 3, 2)), torch.randn(1, 2)
    every = torch.cartesian_prod(torch.arange(4), torch.arange(4))[:, None]
    whole = torch.cat([ids[:, :2].expand(16, 2, 2), every], dim=1)  # all last tokens
    two = [module.LanguageModel.forward(model, whole, texts.expand(16, 2)), model.hidden(whole, texts.expand(16, 2))]
    steps = 4 if kind == "flat" else 2
    assert torch.allclose(two[1][:, :steps], two[1][:1, :steps], atol=1e-6)
    shared = (-two[0]).exp().sum()  # p of the first two tokens
    other = torch.cat([ids[:, :2], (ids[:, 2:] + 1) % 4], dim=1)
    assert shared > (-model(ids, texts)).exp().sum() + (-model(other, texts)).exp().sum() - 1e-9
    pairs = module.Pairs(torch.tensor([[[0]], [[0]], [[1]]]), torch.zeros(3, 2))
    assert module.independent(pairs, pairs, [2]) == pytest.approx(-(2 * math.log(3 / 5) + math.log(2 / 5)) / 3)


def test_search_writes_a_page_a_query(example, tokenizer, tmp_path):
    folder = image_folder(tmp_path / "images", per_class=3)
    lines = example("search_images", tokenizer, folder, "red", "a <b>green</b> one", "-k", 4, "--out", tmp_path / "out")
    assert lines[0].startswith("6 images, 6 bytes each (64 as a float32 embedding)")
    pages = [(tmp_path / "out" / f"{number}.html").read_text() for number in range(2)]
    assert all(page.count('<img src="data:image/png;base64,') == 4 for page in pages)
    assert "<b>" not in pages[1]


@pytest.mark.slow
def test_a_sweep_prunes_and_can_be_repeated(example, captions, tmp_path):
    pytest.importorskip("optuna", reason="pip install 'vqclip[examples]'")
    pairs = {"kind": "retrieval", "name": "pairs", "data": {"kind": "shards", "path": str(captions / "val")}}
    config, metric = tmp_path / "run.yaml", "eval/pairs/codes_only/t2i_r5"
    config.write_text(json.dumps(run_tree(tmp_path, captions / "train", evaluation=[pairs])))
    command = ["optuna_sweep", config, "--metric", metric, "--trials", 6, "--steps", 12, "--every", 2]
    lines = example(*command, "--name", "one")
    assert [re.sub(r"none|0\.\d+ .*", "", line) for line in lines if "pruned after" in line]
    assert all(int(re.search(r"after (\d+)", line)[1]) in (2, 4, 6, 8, 10) for line in lines if "pruned after" in line)
    assert lines[-1].startswith("best: ")
    again = example(*command, "--name", "two")
    assert lines == again
    with pytest.raises(ConfigError, match="run.resume: got 'never'"):
        example(*command, "--name", "one")


@pytest.mark.slow
def test_lancedb_finds_what_search_finds(example, tokenizer, tmp_path):
    pytest.importorskip("lancedb", reason="pip install 'vqclip[lancedb]'")
    folder, queries = image_folder(tmp_path / "images", per_class=3), ["red", "a <b>green</b> one"]
    index = ["--index", str(tmp_path / "index")]
    assert search(["build", "--tokenizer", str(tokenizer), "--data", str(folder), "--out", index[1]]) == 0
    out = tmp_path / "lancedb"
    by_lance = example("search_lancedb", tokenizer, index[1], *queries, "--out", out)[1:]  # after the command
    ours = [line for query in queries for line in found_by_us(query, index, example)]
    assert sorted(by_lance[1:]) == sorted(ours)


def found_by_us(query, index, example):
    lines = example(search, "query", *index, query, "-k", "5")
    return [f"{query!r}: {score} {name}" for _, score, name in (line.split(maxsplit=2) for line in lines)]


def test_missing_data_is_told_in_a_line(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["classify.py", str(tokenizer), str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^error: .*none: no such folder"):
        runpy.run_path(str(EXAMPLES / "classify.py"), run_name="__main__")
