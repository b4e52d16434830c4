"""Folders of models, local or on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vqclip.errors import CheckpointError
from vqclip.io.files import expand_home

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Names of models on the hub: ``owner/name``."""


def find_folder(name: str | Path, revision: str | None, fetched: Sequence[str], left: Sequence[str] = ()) -> Path:
    """Return a local folder, or fetch a model on the hub into the hub's cache.

    Args:
        name: a folder, or a hub name ``owner/name``; an existing folder has precedence.
        revision: branch, tag or commit on the hub; None for the newest.
        fetched: patterns of the names of files to fetch.
        left: patterns of files among them that are not fetched.

    Raises:
        CheckpointError: neither exists, the hub cannot be reached, or a revision of a local folder is given.
    """
    path = expand_home(name)
    if path.exists() or not HUB_NAME.fullmatch(str(name)) or str(name).startswith("."):
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: no such folder; expected a folder that save_pretrained wrote, or the name owner/name of a "
                "model on the hub"
            )
        if revision is not None:
            raise CheckpointError(
                f"{name}: got revision {revision!r} of a local folder, expected none: only models on the hub have any"
            )
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                str(name), revision=revision, allow_patterns=list(fetched), ignore_patterns=list(left) or None
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" (revision {revision!r})"
        raise CheckpointError(
            f"{name}{at}: neither a local folder nor a model on the hub that can be reached or is in its cache: "
            f"{type(error).__name__}: {error}; without a network, load it once on a machine with one, or copy the "
            "folder"
        ) from error
