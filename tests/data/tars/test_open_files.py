from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from vqclip.data.tars.store import OpenFiles
from vqclip.errors import StorageError
from vqclip.io.files import Stamp


def open_now() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("allowed", "most"), [(40, 10), (10**6, 20), (resource.RLIM_INFINITY, 20), (3, 1)])
def test_files_stay_open_within_a_share_of_the_limit(
    tmp_path: Path, allowed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed, allowed))
    files, before = OpenFiles(), open_now()
    for number in [*range(20), 0, 19]:
        path = tmp_path / str(number)
        path.write_bytes(b"%03d" % number)
        status = path.stat()
        assert files.read(path, (3, status.st_mtime_ns), 1, 2, "shard") == b"%02d" % number
    assert open_now() - before == most
    del files
    assert open_now() == before


def test_a_stale_handle_is_closed_and_the_file_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"bytes")
    files, stamp = OpenFiles(), (5, path.stat().st_mtime_ns)
    assert files.read(path, stamp, 0, 5, "shard") == b"bytes"
    before = open_now()

    def fail(file: int) -> Stamp:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(Stamp, "of", fail)
        with pytest.raises(StorageError, match="shard: cannot be read: Stale file handle"):
            files.read(path, stamp, 0, 5, "shard")
    assert open_now() == before - 1
    assert files.read(path, stamp, 0, 5, "shard") == b"bytes"
