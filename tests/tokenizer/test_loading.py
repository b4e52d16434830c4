"""The half of a tokenizer that reads codes, and what each half imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import vqclip
from tests.models import FSQ, IDENTITY, RESIDUAL, VQ, tiny_model
from tests.test_model import edited, rewritten
from vqclip.errors import CheckpointError, ConfigError, ShapeError, VqclipError
from vqclip.model import CLIP
from vqclip.tokenizer import ImageTokenizer, TextTokenizer, Tokenizer
from vqclip.tokenizer.decoder import TokenizerDecoder
from vqclip.tokenizer.fingerprint import fingerprint

CAPTIONS = ["a red star", "x"]
BIAS = "image.project_out.0.bias"


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = tiny_model(RESIDUAL, FSQ).build().eval()
    model.save_pretrained(tmp_path / "tokenizer")
    return model, tmp_path / "tokenizer"


def readers(folder):
    return {name: vqclip.load_tokenizer(folder, name, encode=False) for name in ("image", "text")}


def test_a_reader_is_the_half_of_the_tokenizer_that_reads(saved):
    model, folder = saved
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    for name, reader in readers(folder).items():
        whole = getattr(model, name)
        ids = whole.encode(images if name == "image" else CAPTIONS)
        assert type(reader) is TokenizerDecoder
        assert not reader.training
        assert torch.equal(reader.decode(ids), whole.decode(ids))
        assert torch.equal(reader.embed(ids), whole.embed(ids))
        for fact in ("modality", "num_tokens", "fewest_tokens", "codebook_sizes", "bits_per_sample", "embed_dim"):
            assert getattr(reader, fact) == getattr(whole, fact)
        theirs, ours = whole.state_dict(), reader.state_dict()
        assert set(theirs) - set(ours) == {key for key in theirs if key.startswith(("tower.", "project_in."))}
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_parameters_stand_in_the_order_of_the_data():
    names = [
        name.split(".")[0] for name, _ in tiny_model(VQ | {"learning": "gradient"}).build().image.named_parameters()
    ]
    assert list(dict.fromkeys(names)) == ["tower", "project_in", "quantizer", "project_out", "pool"]


def test_a_reader_does_not_encode(saved):
    reader = readers(saved[1])["text"]
    with pytest.raises(
        VqclipError, match=r'loaded with encode=False.*expected load_tokenizer\(folder, modality="text"'
    ):
        reader.encode(CAPTIONS)
    with pytest.raises(ShapeError, match=r"ids: got shape \(1, 13, 1\), expected \(B, 1 to 12, 1\)"):
        reader.decode(torch.zeros(1, 13, 1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("quantizer", [FSQ, VQ | {"learning": "gradient"}], ids=["fsq", "vq"])
def test_weights_keep_their_type(tmp_path, dtype, quantizer):
    """Codebooks stay in float32 under bfloat16, whichever tensor comes first."""
    model = tiny_model(quantizer).build().eval().to(dtype)
    model.save_pretrained(tmp_path)
    reader = vqclip.load_tokenizer(tmp_path, "image", encode=False)
    theirs = model.image.state_dict()
    assert all(theirs[k].dtype == v.dtype and torch.equal(theirs[k], v) for k, v in reader.state_dict().items())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_reader_that_is_loaded_without_gradients_can_be_trained(saved, context):
    with context():
        reader = readers(saved[1])["text"]
    reader.embed(torch.zeros(2, 12, 1, dtype=torch.int64))[:, 0].sum().backward()
    assert [name for name, weight in reader.named_parameters() if weight.grad is None] == []


def flip_in_tower(folder):
    """One bit of the tower, whose weights a reader does not use."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = next(name for name in header if name.startswith("image.tower."))
    data[8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewritten(lambda state: state.pop(BIAS)), "missing image.project_out.0.bias"),
        (rewritten(lambda state: state.update({"image.surplus": torch.zeros(1)})), "unexpected image.surplus"),
        (rewritten(lambda state: state.update({"image.towers": torch.zeros(1)})), "unexpected image.towers"),
        (rewritten(lambda state: state.update({BIAS: torch.zeros(3)})), r"bias: got shape \(3,\), expected \(16,\)"),
        (flip_in_tower, "SHA-256"),
        (edited(lambda c: c["image"].update(num_tokens=5)), r"pool.position: got shape \(4, 16\), expected \(5, 16\)"),
        (edited(lambda c: c["image"].update(widht=3)), "config.json: image.widht: got 3; Extra inputs"),
        (edited(lambda c: c["image"].pop("quantizer")), "config.json: image.quantizer: Field required"),
        (
            edited(lambda c: c["image"].update(fewest_tokens="4")),
            "image.fewest_tokens: got .4.; Input should be a valid int",
        ),
        (edited(lambda c: c.update(surplus=1)), "config.json: surplus: got 1; Extra inputs"),
        (edited(lambda c: c.update(image=3)), "config.json: image: got 3; Input should be a valid dict"),
        (edited(lambda c: c.pop("image")), "got a temperature with fewer than two tokenizers"),
        (
            edited(lambda c: c["image"].update(project_out={"kind": "attention", "heads": 5})),
            "config.json: image: projection between widths",
        ),
    ],
)
def test_a_reader_is_loaded_strictly(saved, damage, message):
    _, folder = saved
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        vqclip.load_tokenizer(folder, "image", encode=False)


def set_each(**values):
    """A damage to the sections of both modalities."""
    return edited(lambda config: [config[name].update(values) for name in ("image", "text")])


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            rewritten(lambda state: state.update(stray=torch.zeros(1))),
            "does not fit its config.json: unexpected stray$",
        ),
        (rewritten(lambda state: state.update({"imagery.x": torch.zeros(1)})), "unexpected imagery.x$"),
        (rewritten(lambda state: state.update({"logit_scale.x": torch.zeros(1)})), "unexpected logit_scale.x$"),
        (set_each(num_tokens=10**12), "num_tokens: got -?\\d+; Input should be less than or equal to 1048576"),
        (set_each(embed_dim=10**9), "embed_dim: got -?\\d+; Input should be less than or equal to 65536"),
        (set_each(width=2**17), "width: got -?\\d+; Input should be less than or equal to 65536"),
        (set_each(depth=2**20), "depth: got -?\\d+; Input should be less than or equal to 1024"),
        (set_each(quantizer=VQ | {"dim": 10**9}), "vq.dim: got -?\\d+; Input should be less than or equal to 65536"),
        (
            set_each(quantizer=RESIDUAL | {"depth": 10**9}),
            "residual.depth: got -?\\d+; Input should be less than or equal to 65536",
        ),
        (set_each(fewest_tokens=13), "got num_tokens (4|12) and fewest_tokens 13; expected fewest_tokens <= num"),
        (set_each(fewest_tokens=0), "fewest_tokens: got -?\\d+; Input should be greater than or equal to 1"),
        (set_each(num_tokens=None), "config.json: image.num_tokens: got None; Input should be a valid integer"),
        (edited(lambda c: c["text"].pop("fewest_tokens")), "config.json: text.fewest_tokens: Field required"),
    ],
)
def test_a_folder_is_judged_alike_whatever_is_loaded_from_it(saved, damage, message, modality, encode):
    _, folder = saved
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        vqclip.load_tokenizer(folder, modality, encode=encode)


@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_tokens": 2**20}, r"image.pool.position: got shape \(4, 16\), expected \(1048576, 16\)"),
        ({"embed_dim": 2**16}, r"image.pool.head.weight: got shape \(16, 16\), expected \(65536, 16\)"),
        ({"width": 2**16}, r"image.pool.attention.query.weight: got shape \(16, 16\), expected \(65536, 65536\)"),
        ({"depth": 2**10}, r"missing image.pool.blocks.1.mlp.0.weight"),
    ],
)
def test_sizes_are_compared_with_the_weights_before_anything_is_built(saved, monkeypatch, encode, values, message):
    """Or memory is taken for whatever the configuration asks for."""
    _, folder = saved
    set_each(**values)(folder)
    monkeypatch.setattr("vqclip.tokenizer.decoder.PooledEmbedding", lambda *sizes: pytest.fail(f"built: {sizes}"))
    with pytest.raises(CheckpointError, match=message):
        vqclip.load_tokenizer(folder, "image", encode=encode)


def test_tensors_of_the_modality_that_is_not_there_are_strays(saved, tmp_path):
    model, _ = saved
    model.text.save_pretrained(tmp_path / "text")
    for encode in (True, False):
        with pytest.raises(CheckpointError, match="contains text tokenizer; expected one of modality 'image'"):
            vqclip.load_tokenizer(tmp_path / "text", "image", encode=encode)
    rewritten(lambda state: state.update({"image.x": torch.zeros(1), "logit_scale": torch.zeros(())}))(
        tmp_path / "text"
    )
    for encode in (True, False):
        with pytest.raises(CheckpointError, match="unexpected image.x; unexpected logit_scale"):
            vqclip.load_tokenizer(tmp_path / "text", "text", encode=encode)


def test_a_class_loads_its_own_modality(saved, tmp_path):
    model, folder = saved
    for kind, whole in ((ImageTokenizer, model.image), (TextTokenizer, model.text)):
        loaded = kind.from_pretrained(folder)
        assert type(loaded) is kind
        assert not loaded.training
        theirs = whole.state_dict()
        assert all(torch.equal(theirs[name], value) for name, value in loaded.state_dict().items())
    model.text.save_pretrained(tmp_path / "text")
    with pytest.raises(CheckpointError, match="contains text tokenizer; expected one of modality 'image'"):
        ImageTokenizer.from_pretrained(tmp_path / "text")
    with pytest.raises(CheckpointError, match="got revision 'v1' of a local folder"):
        TextTokenizer.from_pretrained(folder, revision="v1")


def test_a_class_that_no_folder_holds_loads_none(saved):
    class Mine(TextTokenizer):
        pass

    for kind in (Tokenizer, Mine):
        with pytest.raises(
            ConfigError, match=rf"^{kind.__name__}.from_pretrained: .* expected ImageTokenizer.from_pre"
        ):
            kind.from_pretrained(saved[1])


def test_stored_numbers_of_tokens_are_those_of_the_tower(saved):
    _, folder = saved
    edited(lambda c: c["text"].update(fewest_tokens=2))(folder)
    for load in (lambda: vqclip.load_tokenizer(folder, "text"), lambda: CLIP.from_pretrained(folder)):
        with pytest.raises(CheckpointError, match=r"config.json: text.fewest_tokens: got 2; this tower has 1"):
            load()


def test_a_reader_without_codes_says_so(tmp_path):
    tiny_model(IDENTITY).build().save_pretrained(tmp_path)
    with pytest.raises(ShapeError, match="Identity has no codebook"):
        vqclip.load_tokenizer(tmp_path, "image", encode=False).decode(torch.zeros(1, 4, 0, dtype=torch.int64))


IMPORTS = """
import json, sys, torch, vqclip
folder, modality, library = sys.argv[1:]
seen = [set(sys.modules)]
t = vqclip.load_tokenizer(folder, modality, encode=False)
ids = torch.zeros(1, t.num_tokens, 1, dtype=torch.int64).expand(-1, -1, len(t.codebook_sizes))
t.decode(ids), t.embed(ids), t.from_vocabulary(t.to_vocabulary(ids)), t.codebook(0)
seen.append(set(sys.modules))
__import__(library)
seen.append(set(sys.modules))
from PIL import Image
t = vqclip.load_tokenizer(folder, modality)
t.encode(Image.new("RGB", (20, 20)) if modality == "image" else ["a red star"])
seen.append(set(sys.modules))
print(json.dumps([sorted(after - before) for before, after in zip(seen, seen[1:])]))
"""
TRAINING = {"webdataset", "tensorboard", "tqdm", "fsspec", "aiohttp", "matplotlib", "open_clip_train", "transformers"}
OUR_TRAINING = ("data.loader", "data.workers", "data.sources", "data.index", "losses", "evaluation", "report", "step")


@pytest.mark.parametrize(("modality", "library"), [("image", "timm"), ("text", "open_clip")])
def test_what_reading_and_encoding_import(saved, modality, library):
    """Reading: no library of towers or pictures. Encoding: the tower's own, with what it imports, and nothing else."""
    arguments = [sys.executable, "-c", IMPORTS, str(saved[1]), modality, library]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    read, theirs, encoding = (set(names) for names in json.loads(done.stdout.splitlines()[-1]))
    assert library in theirs  # so that reading had not imported it
    towers_and_pictures = {"timm", "open_clip", "torchvision", "PIL", "huggingface_hub"}
    assert sorted(read & (towers_and_pictures | TRAINING)) == []
    if modality == "image":
        assert "open_clip" not in theirs | encoding
    packages = {name.split(".")[0] for name in encoding} - {"vqclip", "torchvision", "PIL"}
    assert sorted(name for name in packages if not name.startswith("_")) == []
    assert sorted(name for name in read | encoding if name.removeprefix("vqclip.").startswith(OUR_TRAINING)) == []


def test_a_reader_has_no_fingerprint(saved):
    """It covers the tower, which a reader does not have."""
    with pytest.raises(VqclipError, match=r"has no fingerprint.*to build or search an index"):
        fingerprint(readers(saved[1])["text"])
