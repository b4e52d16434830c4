from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vqclip.files import replace_folder

KILLED = """
import os, sys
from pathlib import Path
from vqclip.files import replace_folder

rename, left, after = Path.rename, int(sys.argv[2]), sys.argv[3] == "after"

def killed(self, target):
    global left
    left -= 1
    if left == 0 and not after:
        os._exit(9)
    rename(self, target)
    if left == 0:
        os._exit(9)

Path.rename = killed
replace_folder(Path(sys.argv[1]), lambda aside: (aside / "content").write_text("new"))
"""


def writing(text: str):
    return lambda aside: (aside / "content").write_text(text)


def full(aside: Path) -> None:
    (aside / "half").write_text("x")
    raise OSError("No space left on device")


def fails(target: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        replace_folder(target, full)


def test_a_folder_is_made_whole_or_stays_as_it_was(tmp_path):
    target = tmp_path / "deep" / "tokenizer"
    fails(target)
    assert not target.exists()
    replace_folder(target, writing("old"))
    fails(target)
    assert (target / "content").read_text() == "old"
    replace_folder(target, writing("new"))
    assert (target / "content").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_rename_loses_nothing(tmp_path, number, moment):
    target = tmp_path / "tokenizer"
    replace_folder(target, writing("old"))
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), str(number), moment], timeout=60)
    assert done.returncode == 9
    fails(target)  # the next try may go wrong as well
    assert (target / "content").read_text() == ("new" if (number, moment) == (2, "after") else "old")
    replace_folder(target, writing("newest"))
    assert (target / "content").read_text() == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
