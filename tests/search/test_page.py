from __future__ import annotations

import html
import os

import torch

from vqclip.io.atomic import write_text
from vqclip.search.page import Hit, page


def test_pages_escape_all_text():
    evil = "\"><script>alert('x')</script>"
    text = page(evil, [Hit(evil, 0.5), Hit(evil, 0.4, torch.zeros(3, 9, 9, dtype=torch.uint8))], evil)
    assert "<script" not in text
    assert text.count(html.escape(evil)) == 6


def test_names_that_are_no_utf_8_are_spelt_out(tmp_path):
    name = os.fsdecode(b"caf\xe9\x1b[2J\n")
    text = page(name, [Hit(name, 0.5)], name)
    assert text.count(r"caf\udce9\x1b[2J\n") == 4
    write_text(tmp_path / "page.html", text)
