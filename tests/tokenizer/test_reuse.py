"""Ids mean the same elsewhere: encoded in one process and read in another, from the folder alone."""

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
from vqclip.errors import ShapeError, VqclipError
from vqclip.tokenizer.decoder import TokenizerDecoder
from vqclip.tokenizer.stored import fingerprint

ROOT = Path(__file__).parents[2]
TWO = ["a red star", "x"]
SCRIPT = f"""
import sys, torch, vqclip
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
folder, store = sys.argv[1:]
found = {{}}
for modality, batch in (("image", load_file(store)["images"]), ("text", {TWO})):
    ids = found[modality] = vqclip.load_tokenizer(folder, modality).encode(batch)
    found[modality + "/embedding"] = vqclip.load_tokenizer(folder, modality, encode=False).embed(ids).detach()
save_file(found, store)
print(vqclip.__file__)
"""
"""What somebody does who has nothing but the installed package and a tokenizer folder."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_alone_encodes_and_reads_the_same_bits(saved, tmp_path, one_thread):
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

    model, folder = saved
    images, store = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8), tmp_path / "store.safetensors"
    save_file({"images": images}, store)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [str(python), "-c", SCRIPT, str(folder), str(store)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(own)
    found = load_file(store)
    for name, batch in (("image", images), ("text", model.text.preprocess(TWO))):
        out = getattr(model, name)(batch)
        assert torch.equal(found[name], out.ids)
        assert torch.equal(found[f"{name}/embedding"], out.embedding)


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


def test_a_reader_without_codes_says_so(tmp_path):
    tiny_model(IDENTITY).build().save_pretrained(tmp_path)
    with pytest.raises(ShapeError, match="Identity has no codebook"):
        vqclip.load_tokenizer(tmp_path, "image", encode=False).decode(torch.zeros(1, 4, 0, dtype=torch.int64))


def test_a_reader_has_no_fingerprint(saved):
    """It covers the tower, which a reader does not have."""
    with pytest.raises(VqclipError, match=r"has no fingerprint.*to build or search an index"):
        fingerprint(readers(saved[1])["text"])
