"""Names, docstrings, messages and pages are in plain English."""

from tests.docs.plain_words import FOLDERS, ROOT, findings


def test_plain_words():
    assert findings([ROOT / name for name in FOLDERS]) == []
