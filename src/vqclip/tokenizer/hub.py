"""Tokenizer folders to the hub; `vqclip.tokenizer.pretrained.resolve` brings them back."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from vqclip.errors import CheckpointError
from vqclip.io.atomic import write_text
from vqclip.tokenizer.card import card as bare_card
from vqclip.tokenizer.pretrained import CARD_FILE, FILES, home_expanded, read_config

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def push_folder(
    folder: str | Path, name: str, *, private: bool | None = None, revision: str | None = None, message: str = ""
) -> str:
    """Send a tokenizer folder to the hub: configuration, weights and card, and nothing else that lies there.

    Every byte is compared with its hash before. The hub asks who you are by huggingface_hub's own means
    (``hf auth login``, or ``HF_TOKEN``).

    Args:
        folder: what `save_pretrained` or a run wrote.
        name: ``owner/name``; made if it is missing.
        private: whether a model that is made can be seen by its owner alone; None: as the hub has it.
        revision: branch to write to, made if it is missing; None for the main one.
        message: of the commit.

    Returns:
        The commit's address.

    Raises:
        CheckpointError: for a folder that is missing or damaged, a name that is none, or a hub that cannot be reached
            or refuses.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"hub: got the name {name!r}, expected owner/name")
    folder = home_expanded(folder)
    for path in (folder / file for file in FILES):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"{path}: is a link or no regular file, expected a file; cp -rL copies them")
    read_config(folder)
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
    except Exception as error:  # huggingface_hub's own errors, and those of whichever HTTP library it uses
        raise CheckpointError(
            f"{name}: could not be sent to the hub: {type(error).__name__}: {error}; `hf auth login` says who you are, "
            "and HF_HUB_OFFLINE must not be set"
        ) from error
    return str(commit.commit_url)


def push_saved(
    save: Callable[[Path], object],
    name: str,
    card: str | None = None,
    *,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """`push_folder` for what ``save`` writes into a folder, with ``card`` beside it, or a bare one."""
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        save(folder)
        title, what = name.rpartition("/")[2], "A tokenizer of images, texts or both, made with vqclip."
        write_text(folder / CARD_FILE, bare_card(title, what) if card is None else card)
        return push_folder(folder, name, private=private, revision=revision)
