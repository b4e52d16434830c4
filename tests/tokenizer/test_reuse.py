"""Ids mean the same elsewhere: encoded in one process and read in another, from the folder alone."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vqclip
from tests.models import IDENTITY, tiny_model
from tests.quantizers.test_contract import CONFIGS
from vqclip.config.messages import kinds_of
from vqclip.errors import ShapeError, VqclipError
from vqclip.quantizers import QuantizerConfig
from vqclip.tokenizer.decoder import TokenizerDecoder
from vqclip.tokenizer.stored import fingerprint

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, torch, vqclip
from pathlib import Path
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
what, folders, store = sys.argv[1], sorted(Path(sys.argv[2]).iterdir()), Path(sys.argv[3])
inputs = {"image": load_file(store / "inputs.safetensors")["images"]}
inputs["text"] = json.loads((store / "captions.json").read_text())
stored, found = {} if what == "encode" else load_file(store / "ids.safetensors"), {}
for folder in folders:
    for modality, batch in inputs.items():
        key = f"{folder.name}/{modality}"
        tokenizer = vqclip.load_tokenizer(folder, modality, encode=what == "encode")
        if what == "encode":
            found[key] = tokenizer.encode(batch)
        else:
            found[f"{key}/vectors"] = tokenizer.decode(stored[key])
            found[f"{key}/embedding"] = tokenizer.embed(stored[key])
if what == "read":
    assert not {"timm", "open_clip", "torchvision", "webdataset", "PIL"} & set(sys.modules)
save_file(found, store / ("ids.safetensors" if what == "encode" else "read.safetensors"))
print(vqclip.__file__)
"""
"""What somebody does who has nothing but the installed package and tokenizer folders."""
CAPTIONS = ["a red star", "two small blue circles on a grey background", "x"]
DISCRETE = [name for name, config in CONFIGS.items() if config.build().codebook_sizes]


def trained(names, folders, store):
    """A model of each family after a step of training, saved; returns what it makes of the inputs."""
    store.mkdir()
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    save_file({"images": images}, store / "inputs.safetensors")
    (store / "captions.json").write_text(json.dumps(CAPTIONS))
    expected = {}
    for name in names:
        torch.manual_seed(0)
        quantizer = CONFIGS[name].model_dump()
        model = tiny_model(quantizer, quantizer).build()
        tokens = model.text.preprocess(CAPTIONS)
        out = model(images, tokens)
        (out.image.embedding * out.text.embedding).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.image.quantizer.update(out.image.stats)
        model.text.quantizer.update(out.text.stats)
        model.eval().save_pretrained(folders / name)
        with torch.no_grad():
            for tokenizer, inputs in ((model.image, images), (model.text, tokens)):
                key, out = f"{name}/{tokenizer.modality}", tokenizer(inputs)
                expected[key] = out.ids
                expected[f"{key}/embedding"] = out.embedding
                expected[f"{key}/vectors"] = tokenizer.decode(out.ids)
    return expected


def run(python, what, folders, store, cwd, **environment):
    arguments = [python, str(cwd / "reuse.py"), what, str(folders), str(store)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def require_same(expected, store):
    found = load_file(store / "ids.safetensors") | load_file(store / "read.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_every_family_is_here():
    assert {CONFIGS[name].kind for name in DISCRETE} == set(kinds_of(QuantizerConfig)) - {"identity"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_alone_encodes_and_reads_the_same_bits(tmp_path, one_thread):
    """An environment with the built wheel and the dependencies' packages.

    The dependencies are those installed here, by a path file, lest gigabytes are fetched again; path files in
    their folder, such as that of an editable vqclip, are not followed.
    """
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(wheels)], check=True, timeout=300
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=300)
    python = venv / "bin" / "python"
    (wheel,) = wheels.iterdir()
    install = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    (own,) = venv.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    expected = trained(DISCRETE, tmp_path / "folders", tmp_path / "store")
    (tmp_path / "reuse.py").write_text(SCRIPT)
    for what in ("encode", "read"):
        found = run(str(python), what, tmp_path / "folders", tmp_path / "store", tmp_path, PYTHONPATH="")
        assert found.is_relative_to(own)
    require_same(expected, tmp_path / "store")


TWO = ["a red star", "x"]


def readers(folder):
    return {name: vqclip.load_tokenizer(folder, name, encode=False) for name in ("image", "text")}


def test_a_reader_is_the_half_of_the_tokenizer_that_reads(saved):
    model, folder = saved
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    for name, reader in readers(folder).items():
        whole = getattr(model, name)
        ids = whole.encode(images if name == "image" else TWO)
        assert type(reader) is TokenizerDecoder
        assert not reader.training
        assert torch.equal(reader.decode(ids), whole.decode(ids))
        assert torch.equal(reader.embed(ids), whole.embed(ids))
        for fact in ("modality", "num_tokens", "fewest_tokens", "codebook_sizes", "bits_per_sample", "embed_dim"):
            assert getattr(reader, fact) == getattr(whole, fact)
        theirs, ours = whole.state_dict(), reader.state_dict()
        assert set(theirs) - set(ours) == {key for key in theirs if key.startswith(("tower.", "project_in."))}
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_reader_does_not_encode(saved):
    reader = readers(saved[1])["text"]
    with pytest.raises(
        VqclipError, match=r'loaded with encode=False.*expected load_tokenizer\(folder, modality="text"'
    ):
        reader.encode(TWO)
    with pytest.raises(ShapeError, match=r"ids: got shape \(1, 13, 1\), expected \(B, 1 to 12, 1\)"):
        reader.decode(torch.zeros(1, 13, 1, dtype=torch.int64))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_reader_that_is_loaded_without_gradients_can_be_trained(saved, context):
    with context():
        reader = readers(saved[1])["text"]
    ids = torch.zeros(2, 12, 1, dtype=torch.int64)
    assert not reader.embed(ids).requires_grad
    reader.requires_grad_().embed(ids)[:, 0].sum().backward()
    assert [name for name, weight in reader.named_parameters() if weight.grad is None] == []


def test_a_reader_without_codes_says_so(tmp_path):
    tiny_model(IDENTITY).build().save_pretrained(tmp_path)
    with pytest.raises(ShapeError, match="Identity has no codebook"):
        vqclip.load_tokenizer(tmp_path, "image", encode=False).decode(torch.zeros(1, 4, 0, dtype=torch.int64))


def test_a_reader_has_no_fingerprint(saved):
    """It covers the tower, which a reader does not have."""
    with pytest.raises(VqclipError, match=r"has no fingerprint.*to build or search an index"):
        fingerprint(readers(saved[1])["text"])
