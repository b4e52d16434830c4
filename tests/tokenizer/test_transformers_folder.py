"""Folders of tokenizers with towers of transformers: complete, strict, and only data."""

import hashlib
import json
import shutil

import pytest
import torch

import vqclip
from tests.data.hostile import marking_pickle
from tests.models import reseal, tiny_model
from tests.tokenizer.test_folder import edited, flip_last, of_file
from tests.towers.transformers_models import CAPTIONS, make_image, make_text, word_pieces
from vqclip.errors import CheckpointError, ShapeError
from vqclip.export.to_onnx import export_program
from vqclip.model import CLIP
from vqclip.tokenizer.stored import fingerprint

VOCABULARY = "tokenizer.json"
pytestmark = pytest.mark.filterwarnings("ignore:captions longer than 12 tokens")


def both(folder):
    make_image(folder / "vit")
    make_text(folder / "bert")
    config = tiny_model().model_dump()
    config["image"]["tower"] = {"kind": "transformers", "name": str(folder / "vit"), "train": "none"}
    config["text"]["tower"] = {"kind": "transformers", "name": str(folder / "bert"), "context_length": 12}
    return type(tiny_model()).model_validate(config)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, and its folder; the towers' own folders are gone."""
    folder = tmp_path_factory.mktemp("exported")
    model = both(folder).build().eval()
    model.save_pretrained(folder / "tokenizer")
    shutil.rmtree(folder / "vit")
    shutil.rmtree(folder / "bert")
    return model, folder / "tokenizer"


@pytest.fixture
def copied(exported, tmp_path):
    return shutil.copytree(exported[1], tmp_path / "tokenizer")


def load(folder):
    return vqclip.load_tokenizer(folder, "text")


def test_it_loads_offline_without_the_towers_folders(exported):
    model, folder = exported
    names = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", VOCABULARY}
    assert {path.name for path in folder.iterdir()} == names
    text, image = load(folder), vqclip.load_tokenizer(folder, "image")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(text.encode(CAPTIONS), model.text.encode(CAPTIONS))
    assert torch.equal(image.encode(pixels), model.image.encode(pixels))
    assert fingerprint(text) == fingerprint(model.text)
    assert fingerprint(image) == fingerprint(model.image)
    whole = CLIP.from_pretrained(folder)
    assert torch.equal(whole.text.encode(CAPTIONS), model.text.encode(CAPTIONS))
    decoder = vqclip.load_tokenizer(folder, "text", encode=False)
    ids = text.encode(CAPTIONS)
    assert torch.equal(decoder.embed(ids), model.text.embed(ids))
    assert str(folder.parent) not in (folder / "config.json").read_text()


def test_it_is_saved_again_as_it_was(exported, tmp_path):
    for modality in ("text", "image"):
        vqclip.load_tokenizer(exported[1], modality).save_pretrained(tmp_path / modality)
        again = vqclip.load_tokenizer(tmp_path / modality, modality)
        assert fingerprint(again) == fingerprint(getattr(exported[0], modality))
    assert (tmp_path / "text" / VOCABULARY).read_bytes() == (exported[1] / VOCABULARY).read_bytes()
    assert not (tmp_path / "image" / VOCABULARY).exists()
    load(tmp_path / "text").save_pretrained(tmp_path / "text")


def test_captions_and_their_numbers_are_checked(exported):
    text = load(exported[1])
    tokens = text.preprocess(CAPTIONS[:3])
    assert torch.equal(text.encode(tokens), text.encode(CAPTIONS[:3]))
    assert (text.encode(tokens)[..., 0] == -1).equal(tokens == -1)
    assert text.needed_tokens(tokens) == 12
    assert text.needed_tokens(tokens[:2]) == 8
    with pytest.raises(ShapeError, match="token after padding"):
        text.encode(torch.tensor([[2, -1, 3] + [-1] * 9]))
    with pytest.warns(UserWarning, match="captions longer than 12 tokens"):
        ids = text.encode(CAPTIONS)
    assert torch.equal(export_program(text, "encode").module()(text.preprocess(CAPTIONS)), ids)
    before = fingerprint(text)
    text.preprocess._content += b"\n"
    assert fingerprint(text) != before  # another vocabulary is another tokenizer


def replace_vocabulary(folder, content):
    """Another file whose digest is right."""
    (folder / VOCABULARY).write_bytes(content)
    digest = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reseal(folder, lambda body: body["files"].update({VOCABULARY: digest}))


def larger_vocabulary(folder):
    tokenizer = word_pieces()
    tokenizer.add_tokens([f"new{n}" for n in range(90)])
    replace_vocabulary(folder, tokenizer.to_str().encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (of_file(VOCABULARY, flip_last), "tokenizer.json: SHA-256"),
        (lambda f: (f / VOCABULARY).unlink(), "tokenizer.json: no such file"),
        (edited(lambda b: b.pop("files")), r"files: got \[\]; expected \['tokenizer.json'\]"),
        (
            edited(lambda b: b["files"].update({"../x": b["files"][VOCABULARY]})),
            r"files.*: got '../x'; Input should be 'tokenizer.json'",
        ),
        (edited(lambda b: b["files"][VOCABULARY].update(size=1 << 40)), "bytes; expected at most"),
        (lambda f: replace_vocabulary(f, marking_pickle(f / "ran")), "text.tower.name: tokenizer.json cannot be read"),
        (larger_vocabulary, "has 155 tokens, the network 90"),
        (edited(lambda b: b["text"]["tower"].update(name="/etc")), "text.tower"),
        (edited(lambda b: b["text"]["tower"].update(pretrained=True)), "text.tower"),
    ],
)
def test_damaged_and_forged_files_are_refused(damage, message, copied):
    damage(copied)
    with pytest.raises(CheckpointError, match=message):
        load(copied)
    assert not (copied / "ran").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 60_000, "intermediate_size": 60_000}, "does not fit the weights: .*got shape"),
        ({"num_hidden_layers": 1000}, "does not fit the weights: missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000; expected at most 1024"),
        ({"model_type": "gpt2"}, "no encoder of text"),
        ({"hidden_act": "system"}, "transformers cannot make this model"),
    ],
)
def test_forged_settings_of_the_network_take_no_memory(settings, message, copied):
    reseal(copied, lambda body: body["text"]["tower"]["network"].update(settings))
    with pytest.raises(CheckpointError, match=message):
        load(copied)


def test_a_kernel_named_in_the_settings_is_not_fetched(copied, exported):
    evil = dict.fromkeys(("_attn_implementation", "attn_implementation"), "someone/kernel")
    evil["part"] = {"attn_implementation": "a/b"}
    reseal(copied, lambda body: body["text"]["tower"]["network"].update(evil))
    text = load(copied)
    assert text.tower.transformer.config._attn_implementation == "sdpa"
    assert torch.equal(text.encode(CAPTIONS[:3]), exported[0].text.encode(CAPTIONS[:3]))


def test_sections_of_older_towers_are_as_before():
    """Their fingerprints, with which token shards and indexes are tied to them, stay."""
    model = tiny_model().build()
    sections = json.dumps([model.image.section(), model.text.section()], sort_keys=True)
    assert hashlib.sha256(sections.encode()).hexdigest()[:16] == "889fd54b90155922"
