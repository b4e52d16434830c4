import fnmatch
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

import vqclip
from tests.models import IDENTITY, tiny_model
from vqclip import load_tokenizer
from vqclip.errors import CheckpointError, ConfigError, ShapeError, VqclipError
from vqclip.model import CLIP
from vqclip.pixels import ConvolutionalPixelsConfig, attach
from vqclip.tokenizer.decoder import TokenizerDecoder
from vqclip.tokenizer.folder import PACKAGED, find_folder
from vqclip.tokenizer.saving import push_folder
from vqclip.tokenizer.stored import fingerprint

ROOT = Path(__file__).parents[2]
IMPORTS = """
import json, sys, torch, vqclip
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
folder, store = sys.argv[1:]
seen, stored, found = [set(sys.modules)], load_file(store), {}
for modality in ("image", "text"):
    t, ids = vqclip.load_tokenizer(folder, modality, encode=False), stored[modality]
    found[modality + "/embedding"] = t.embed(ids).detach()
    t.decode(ids), t.from_vocabulary(t.to_vocabulary(ids)), t.codebook(0)
seen.append(set(sys.modules))
from PIL import Image
for modality, library, batch in (("image", "timm", stored["pixels"]), ("text", "open_clip", ["a red star", "x"])):
    __import__(library)
    seen.append(set(sys.modules))
    t = vqclip.load_tokenizer(folder, modality)
    found[modality] = t.encode(batch)
    t.encode(Image.new("RGB", (20, 20)) if modality == "image" else ["a red star"])
    seen.append(set(sys.modules))
save_file(found, store)
print(json.dumps([vqclip.__file__, *(sorted(after - before) for before, after in zip(seen, seen[1:]))]))
"""

TRAINING = {"webdataset", "tensorboard", "tqdm", "fsspec", "aiohttp", "matplotlib", "open_clip_train", "transformers"}

OUR_TRAINING = ("data.loader", "data.workers", "data.sources", "data.index", "losses", "evaluation", "report", "step")


def used_by_another_process(saved, store, **environment):
    """Compare the bits of another process; return where its package is, and what each of its steps imported."""
    torch.set_num_threads(1)  # as the other process
    model, folder = saved
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    outputs = {"image": model.image(pixels), "text": model.text(model.text.preprocess(["a red star", "x"]))}
    save_file({"pixels": pixels} | {name: out.ids for name, out in outputs.items()}, store)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(folder), str(store)],
        cwd=store.parent, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = load_file(store)
    for name, out in outputs.items():
        assert torch.equal(found[name], out.ids)
        assert torch.equal(found[f"{name}/embedding"], out.embedding)
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_has_the_same_bits_and_imports_what_it_needs(saved, tmp_path):
    """Reading: no library of towers or images. Encoding: the tower's own, with what it imports, and nothing else."""
    _, *imported = used_by_another_process(saved, tmp_path / "store")
    read, timm, image, open_clip, text = map(set, imported)
    towers_and_images = {"timm", "open_clip", "torchvision", "PIL", "huggingface_hub"}
    assert sorted(read & (towers_and_images | TRAINING)) == []
    assert "timm" in timm
    assert "open_clip" in open_clip  # so neither reading nor encoding images had imported it
    packages, known = ({name.split(".")[0] for name in names} for names in (image | text, read))
    packages -= known | {"vqclip", "torchvision", "PIL", "simplejpeg"}
    assert sorted(name for name in packages if not name.startswith("_")) == []
    ours = read | image | text
    assert sorted(name for name in ours if name.removeprefix("vqclip.").startswith(OUR_TRAINING)) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_has_the_same_bits(saved, tmp_path):
    """With the dependencies that are installed here, lest gigabytes are fetched again."""
    make = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run(make, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    package, *_ = used_by_another_process(saved, tmp_path / "store", PYTHONPATH=str(tmp_path / "site"))
    assert Path(package).is_relative_to(tmp_path / "site")


def test_a_reader_is_the_half_of_the_tokenizer_that_reads(saved, tmp_path):
    model, folder = saved
    captions = ["a red star", "x"]
    inputs = {"image": torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), "text": captions}
    for name, batch in inputs.items():
        whole, reader = getattr(model, name), load_tokenizer(folder, name, encode=False)
        ids = whole.encode(batch)
        assert type(reader) is TokenizerDecoder
        assert not reader.training
        assert torch.equal(reader.decode(ids), whole.decode(ids))
        assert torch.equal(reader.embed(ids), whole.embed(ids))
        for fact in ("modality", "num_tokens", "fewest_tokens", "codebook_sizes", "bits_per_sample", "embed_dim"):
            assert getattr(reader, fact) == getattr(whole, fact)
        theirs, ours = whole.state_dict(), reader.state_dict()
        assert set(theirs) - set(ours) == {key for key in theirs if key.startswith(("tower.", "project_in."))}
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    with pytest.raises(VqclipError, match=r'loaded with encode=False.*expected load_tokenizer\(.*modality="text"'):
        reader.encode(captions)
    with pytest.raises(VqclipError, match=r"has no fingerprint.*to build or search an index"):
        fingerprint(reader)  # it covers the tower
    with pytest.raises(ShapeError, match=r"ids: got shape \(1, 13, 1\), expected \(B, 1 to 12, 1\)"):
        reader.decode(torch.zeros(1, 13, 1, dtype=torch.int64))
    tiny_model(IDENTITY).build().save_pretrained(tmp_path / "without codes")
    with pytest.raises(ShapeError, match="Identity has no codebook"):
        load_tokenizer(tmp_path / "without codes", "image", encode=False).decode(torch.zeros(1, 4, 0).long())


def test_torchs_default_device_changes_nothing(saved):
    with torch.device("meta"), pytest.raises(ConfigError, match="default device meta.*load it outside"):
        load_tokenizer(saved[1], "image")


# The tokenizer that comes with the package.


def test_it_finds_the_words_for_an_image_and_decodes_it():
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((6, 6, 58, 58), fill="red")
    tok, text = load_tokenizer("emoji", "image"), load_tokenizer("emoji", "text")
    ids = tok.encode(image)
    captions = ["red circle", "blue circle", "red apple", "green apple", "hamster", "family"]
    similarity = tok.embed(ids) @ text.embed(text.encode(captions)).T
    assert captions[int(similarity.argmax())] == "red circle"
    decoded = tok.to_pil(tok.decode_pixels(ids))[0]
    red, green, blue = decoded.getpixel((32, 32))
    assert red > 150 > max(green, blue)
    assert min(decoded.getpixel((1, 1))) > 220


def test_it_is_small_and_has_a_card_and_a_folder_of_its_name_has_precedence(tmp_path, monkeypatch):
    for name in PACKAGED:
        files = [path for path in find_folder(name).iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 4e6
        card = (find_folder(name) / "README.md").read_text()
        assert all(part in card for part in ("license: apache-2.0", "Google LLC", "Unicode, Inc."))
    CLIP.from_pretrained("emoji").save_pretrained(tmp_path / "emoji")
    monkeypatch.chdir(tmp_path)
    assert find_folder("emoji").absolute() == tmp_path / "emoji"


# What is sent to the hub: by a stand-in for its interface.

ADDRESS = "https://hub/somebody/model/commit/1"


@pytest.fixture
def hub(monkeypatch):
    """Keeps the files that it is sent, and what it is asked to do."""
    api = mock.MagicMock(files={})

    def upload_folder(*, folder_path, allow_patterns, **about):
        for path in Path(folder_path).rglob("*"):
            name = str(path.relative_to(folder_path))
            if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                api.files[name] = path.read_bytes()
        return SimpleNamespace(commit_url=ADDRESS)

    api.upload_folder.side_effect = upload_folder
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    return api


@pytest.mark.parametrize("part", ["image", "text", "both"])
def test_what_is_pushed_can_be_loaded(hub, tmp_path, part):
    model = tiny_model().build()
    decoder = []
    if part == "both":
        attach(model.image, ConvolutionalPixelsConfig(channels=8).build(3, 4, 16))
        decoder = ["pixels.safetensors"]
    saved = model if part == "both" else getattr(model, part)
    assert saved.push_to_hub("somebody/model", private=True) == ADDRESS
    processor = [] if part == "text" else ["preprocessor_config.json"]
    assert sorted(hub.files) == sorted(["README.md", "config.json", "model.safetensors", *decoder, *processor])
    hub.create_repo.assert_called_once_with("somebody/model", private=True, exist_ok=True)
    for name, data in hub.files.items():
        (tmp_path / name).write_bytes(data)
    CLIP.from_pretrained(tmp_path) if part == "both" else vqclip.load_tokenizer(tmp_path, part)
    card = hub.files["README.md"].decode()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "vqclip"
    assert "license" not in front
    assert "No figures were given" in card


def test_a_folder_is_pushed_with_its_card_and_nothing_else(hub, tmp_path):
    tiny_model().build().save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "ids").mkdir()
    (tmp_path / "ids" / "config.json").write_text("{}")
    push_folder(tmp_path, "somebody/model", revision="v2", message="second")
    assert hub.files["README.md"] == b"a card"
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"}
    assert [name for name, *_ in hub.mock_calls] == ["create_repo", "create_branch", "upload_folder"]
    hub.create_branch.assert_called_once_with("somebody/model", branch="v2", exist_ok=True)
    about = hub.upload_folder.call_args.kwargs
    assert (about["repo_id"], about["revision"], about["commit_message"]) == ("somebody/model", "v2", "second")


def test_a_hub_is_asked_for_a_revision_and_for_json_and_safetensors_alone(tmp_path, monkeypatch):
    tiny_model().build().save_pretrained(tmp_path)
    download = mock.Mock(return_value=str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    vqclip.load_tokenizer("somebody/model", "text")
    vqclip.load_tokenizer("somebody/model", "text", encode=False, revision="v3")
    CLIP.from_pretrained("somebody/model", revision="v4")
    files = {"config.json", "model.safetensors", "pixels.safetensors", "README.md", "preprocessor_config.json"}
    for call, revision in zip(download.call_args_list, (None, "v3", "v4"), strict=True):
        assert (call.args, call.kwargs["revision"]) == (("somebody/model",), revision)
        assert set(call.kwargs["allow_patterns"]) == files | {"tokenizer.json"}
    with pytest.raises(CheckpointError, match=r"got revision 'v2' of a local folder, expected none"):
        vqclip.load_tokenizer(tmp_path, "text", revision="v2")


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch, tmp_path):
    """huggingface_hub itself, told to stay offline, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    told = r"(?s)^somebody/model \(revision 'v2'\): neither a local folder nor .* in its cache: .*copy"
    with pytest.raises(CheckpointError, match=told):
        vqclip.load_tokenizer("somebody/model", "text", revision="v2")


def test_what_cannot_be_pushed_is_refused_and_a_link_is_not_followed(hub, tmp_path):
    folder = tmp_path / "tokenizer"
    with pytest.raises(CheckpointError, match="hub: got the name 'model', expected owner/name"):
        push_folder(folder, "model")
    with pytest.raises(CheckpointError, match="expected a tokenizer folder"):
        push_folder(folder, "somebody/model")
    tiny_model().build().save_pretrained(folder)
    hub.create_repo.side_effect = ConnectionError("offline")
    with pytest.raises(CheckpointError, match="somebody/model: could not be sent to the hub: ConnectionError: offline"):
        push_folder(folder, "somebody/model")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        push_folder(folder, "somebody/model")
    (tmp_path / "secret").write_text("a key")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"README\.md: is a link"):
        push_folder(folder, "somebody/model")
    assert not hub.files
