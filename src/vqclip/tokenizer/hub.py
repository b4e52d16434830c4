"""Tokenizer folders on the hub: push them, with a card, the page that the hub shows (Markdown)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from vqclip.errors import CheckpointError
from vqclip.io import hub
from vqclip.io.atomic import write_text
from vqclip.io.files import expand_home
from vqclip.tokenizer.folder import CARD_FILE, FILES, TokenizerFolder

FRONT = """---
library_name: vqclip
tags: [clip, image-tokenizer, text-tokenizer, vector-quantization]
# license: add the license of the weights here, such as apache-2.0
---
"""

USE = """
```python
import vqclip

tokenizer = vqclip.load_tokenizer(folder, modality="image")  # this folder, or its name on the hub
ids = tokenizer.encode(images)  # (B, N, C) int64; for modality="text" a list of captions
embedding = tokenizer.embed(ids)  # (B, E) unit-norm, in the joint space of images and texts
```

`tokenizer.decode(ids)` returns the vectors `(B, N, D)` for a downstream model. With a pixel decoder in the folder
(`pixels.safetensors`), `tokenizer.to_pil(tokenizer.decode_pixels(ids))` returns images.
`load_tokenizer(folder, modality="image", encode=False)` decodes and embeds stored ids without the tower and its
library.
"""

NO_FIGURES = "No figures were given: the card of a run's own folder has those of its evaluation."


def push_folder(
    folder: str | Path, name: str, *, private: bool | None = None, revision: str | None = None, message: str = ""
) -> str:
    """Push a tokenizer folder to the hub: configuration, weights and card, and no other file.

    Every byte is compared with its checksum first. huggingface_hub finds the credentials (``hf auth login``, or
    ``HF_TOKEN``).

    Args:
        folder: folder that `save_pretrained` or a run wrote.
        name: ``owner/name``; made if it is missing.
        private: whether a new model is visible to its owner only; None: the hub's default.
        revision: branch to write to, made if it is missing; None for the main one.
        message: of the commit.

    Returns:
        The commit's address.

    Raises:
        CheckpointError: for a folder that is missing or damaged, an invalid name, or a hub that cannot be reached or
            refuses.
    """
    if not hub.HUB_NAME.fullmatch(name):
        raise CheckpointError(f"hub: got the name {name!r}, expected owner/name")
    folder = expand_home(folder)
    for path in (folder / file for file in FILES):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"{path}: is a link or not a regular file, expected a file; cp -rL copies them")
    TokenizerFolder.open(folder)
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=list(FILES),
            revision=revision,
            commit_message=message or "Tokenizer, written by vqclip",
        )
    except Exception as error:  # huggingface_hub's own errors, and those of its HTTP library
        raise CheckpointError(
            f"{name}: could not be sent to the hub: {type(error).__name__}: {error}; `hf auth login` shows your "
            "account, and HF_HUB_OFFLINE must not be set"
        ) from error
    return str(commit.commit_url)


def save_and_push(
    save: Callable[[Path], object],
    name: str,
    text: str | None = None,
    *,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Push what ``save`` writes into a temporary folder, with the card ``text`` or a plain one; see `push_folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(folder)
        title, what = name.rpartition("/")[2], "A tokenizer of images, texts or both, made with vqclip."
        write_text(folder / CARD_FILE, card(title, what) if text is None else text)
        return push_folder(folder, name, private=private, revision=revision)


def card(title: str, what: str, more: str = NO_FIGURES) -> str:
    """Return a card.

    Args:
        title: first line.
        what: description of the tokenizers in a sentence or two.
        more: figures, data, training.
    """
    return f"{FRONT}# {title}\n\n{what}\n{USE}\n{more.rstrip()}\n"
