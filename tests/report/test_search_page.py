from __future__ import annotations

import os

import torch
from markupsafe import escape

from vqclip.io.atomic import write_text
from vqclip.report.page import search_page
from vqclip.search.scan import Hit


def test_pages_escape_all_text():
    evil = "\"><script>alert('x')</script>"
    text = search_page(evil, [Hit(evil, 0.5), Hit(evil, 0.4, torch.zeros(3, 9, 9, dtype=torch.uint8))], evil)
    assert "<script" not in text
    assert text.count(str(escape(evil))) == 6


def test_names_that_are_no_utf_8_are_spelt_out(tmp_path):
    name = os.fsdecode(b"caf\xe9\x1b[2J\n")
    text = search_page(name, [Hit(name, 0.5)], name)
    assert text.count(r"caf\udce9\x1b[2J\n") == 4
    write_text(tmp_path / "page.html", text)
