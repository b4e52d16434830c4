from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from vqclip.data.open_files import OpenFiles


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
