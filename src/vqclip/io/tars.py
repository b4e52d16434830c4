"""Writing of tars, by webdataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import BinaryIO

__all__ = ["write_tar"]


def write_tar(file: BinaryIO, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write samples in their order, as pairs of a key and its members (ending → content).

    Equal samples make equal bytes: headers contain no time, user or machine.
    """
    from webdataset import TarWriter  # imports torch

    with TarWriter(file, user="", group="", mode=0o644, encoder=False, mtime=0) as tar:
        for key, members in samples:
            tar.write({"__key__": key, **members})
