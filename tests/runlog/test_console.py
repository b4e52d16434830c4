from __future__ import annotations

import io
import logging
import warnings

import pytest

from vqclip.runlog import console
from vqclip.runlog.console import fit_lines, log_to_stderr

WORDS = " ".join(["word"] * 30)


def test_only_vqclip_reports_and_its_lines_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (logging.getLogger(), logging.getLogger("vqclip")):
        monkeypatch.setattr(each, "level", each.level)
        monkeypatch.setattr(each, "handlers", [])
    monkeypatch.setattr(console, "columns", lambda: 60)
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with warnings.catch_warnings():
        log_to_stderr(lambda text: text.replace("secret", "..."))
        logging.getLogger("vqclip.data").info("secret: %s", WORDS)
        logging.getLogger("vqclip.data").warning("a warning")
        for name in ("aiobotocore.credentials", "azure.core", "another"):
            logging.getLogger(name).warning("a request")
        warnings.warn("torchao is old", stacklevel=1)
    first, *others, last = stderr.getvalue().splitlines()
    assert first[8:].startswith(" ...: word word")
    assert all(line.startswith(" " * 9 + "word") for line in others)
    assert max(map(len, (first, *others))) <= 60
    assert last[8:] == " warning: a warning"


def test_long_lines_are_broken_between_words_below_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "columns", lambda: 40)
    path = "/a/path/" + "x" * 60
    text = fit_lines(f"  speed       701 images/s on 2 processes, 1 %\nshort\n{path} is long, and {path}")
    assert text.splitlines() == [
        "  speed       701 images/s on 2",
        "              processes, 1 %",
        "short",
        path,
        "  is long, and",
        f"  {path}",
    ]
