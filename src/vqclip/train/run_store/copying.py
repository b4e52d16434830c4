"""Copy a run from a URL, for commands that read run folders."""

from __future__ import annotations

import logging
from pathlib import Path

from vqclip import checkpoint
from vqclip.data.remote import TransferConfig
from vqclip.data.remote.folder import RemoteFolder, require_writable
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.atomic import replace_folder
from vqclip.train.run_store.lease import LEASES
from vqclip.train.run_store.mirror import CHECKPOINTS, complete_checkpoints

logger = logging.getLogger(__name__)


def copy_run(url: str, folder: Path, all_checkpoints: bool = False) -> Path:
    """Copy the run at a URL: its files, and its newest checkpoint or all of them, verified.

    Args:
        url: of the run, such as ``s3://bucket/runs/base``.
        folder: to write; must not exist.
        all_checkpoints: copy all checkpoints, also those that were set aside, without verifying them.

    Returns:
        The folder.

    Raises:
        ConfigError: no URL of an object store, or the folder exists or cannot be written.
        CheckpointError: there is no run, or no intact checkpoint.
        StorageError: it cannot be fetched.
    """
    if "://" not in (url := require_writable(url)):
        raise ConfigError(f"{url}: expected a URL of a run, such as s3://bucket/runs/base")
    if folder.exists():
        raise ConfigError(f"{folder}: exists; expected a new folder")
    remote = RemoteFolder(url, TransferConfig(total_s=600.0))
    names = remote.list()
    if not any(name == "run.json" or name.startswith(f"{CHECKPOINTS}/") for name in names):
        below = "there are files, but no run.json" if names else "nothing is below this name"
        raise CheckpointError(f"{remote}: no run there: {below}. Are the names of bucket, folder and run right?")

    remote.require_tree(names)

    def fill(aside: Path) -> None:
        for name in sorted(names):
            top = name.split("/")[0]
            if top not in (LEASES, CHECKPOINTS) or (top == CHECKPOINTS and all_checkpoints):
                remote.download(name, aside / name)
        if not all_checkpoints:
            checkpoint.use_latest(aside / CHECKPOINTS, fetch, complete_checkpoints(aside, names))

    def fetch(path: Path) -> None:
        base = f"{CHECKPOINTS}/{path.name}/"
        for name in names:
            if name.startswith(base):
                remote.download(name, path / name.removeprefix(base))
        checkpoint.verify(path)

    try:
        replace_folder(folder, fill)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); expected a new folder on a disk with room"
        ) from None
    return folder
