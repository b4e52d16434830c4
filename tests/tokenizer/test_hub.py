"""What is sent to the hub: by a stand-in for its interface."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import vqclip
from tests.models import tiny_model
from vqclip.errors import CheckpointError
from vqclip.model import CLIP
from vqclip.pixels import ConvolutionalPixelsConfig, attach
from vqclip.tokenizer.saving import push_folder

ADDRESS = "https://hub/somebody/model/commit/1"


class Hub:
    """Keeps what it is sent, and what it is asked to do."""

    def __init__(self, monkeypatch):
        self.files, self.calls = {}, []
        # A class, for transformers annotates with `HfApi | None` while it is imported.
        monkeypatch.setattr("huggingface_hub.HfApi", type("HfApi", (), {"__new__": lambda cls: self}))

    def create_repo(self, name, **options):
        self.calls.append(("repo", name, options))

    def create_branch(self, name, **options):
        self.calls.append(("branch", name, options))

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, revision, commit_message):
        self.calls.append(("upload", repo_id, {"revision": revision, "message": commit_message}))
        for path in Path(folder_path).rglob("*"):
            name = str(path.relative_to(folder_path))
            if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                self.files[name] = path.read_bytes()
        return SimpleNamespace(commit_url=ADDRESS)


@pytest.fixture
def hub(monkeypatch):
    return Hub(monkeypatch)


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
    assert hub.calls[0] == ("repo", "somebody/model", {"private": True, "exist_ok": True})
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
    assert [call[0] for call in hub.calls] == ["repo", "branch", "upload"]
    assert hub.calls[1][2] == {"branch": "v2", "exist_ok": True}
    assert hub.calls[2][2] == {"revision": "v2", "message": "second"}


def test_a_revision_is_asked_for(tmp_path, monkeypatch):
    tiny_model().build().save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.append(options["revision"]) or str(tmp_path)
    )
    vqclip.load_tokenizer("somebody/model", "text", revision="v2")
    vqclip.load_tokenizer("somebody/model", "text", encode=False, revision="v3")
    CLIP.from_pretrained("somebody/model", revision="v4")
    assert asked == ["v2", "v3", "v4"]
    with pytest.raises(CheckpointError, match=r"got revision 'v2' of a local folder, expected none"):
        vqclip.load_tokenizer(tmp_path, "text", revision="v2")


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch, tmp_path):
    """huggingface_hub itself, told to stay offline, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)^somebody/model \(revision 'v2'\): neither a local folder nor .* in its cache: .*copy",
    ):
        vqclip.load_tokenizer("somebody/model", "text", revision="v2")


def test_what_cannot_be_pushed_is_refused_and_a_link_is_not_followed(hub, tmp_path, monkeypatch):
    folder = tmp_path / "tokenizer"
    with pytest.raises(CheckpointError, match="hub: got the name 'model', expected owner/name"):
        push_folder(folder, "model")
    with pytest.raises(CheckpointError, match="expected a tokenizer folder"):
        push_folder(folder, "somebody/model")
    tiny_model().build().save_pretrained(folder)
    monkeypatch.setattr(hub, "create_repo", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("offline")))
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
