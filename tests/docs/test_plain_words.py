"""Names, docstrings, messages and pages are in plain English."""

from __future__ import annotations

from tests.docs.plain_words import FOLDERS, ROOT, findings

SOURCE = ROOT / "src" / "vqclip"
PACKAGES = ("__init__.py", "__main__.py", "model.py", "errors.py", "seeds.py", "cli", "config", "evaluation")


def test_plain_words():
    pages = [ROOT / name for name in FOLDERS if name != "src"]
    assert findings([*(SOURCE / name for name in PACKAGES), *pages]) == []
