from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from vqclip.report.images import code_colour, code_map, find_grid


def test_a_code_has_one_colour_and_near_codes_have_others():
    colours = [code_colour(code) for code in range(256)]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert len(set(colours)) > 250
    assert code_colour(2**62) == code_colour(2**62)


@pytest.mark.parametrize(("tokens", "grid"), [(16, (4, 4)), (12, (3, 4)), (7, (1, 7)), (1, (1, 1)), (0, (1, 1))])
def test_tokens_fill_a_grid(tokens, grid):
    assert find_grid(tokens) == grid


def test_a_map_has_a_cell_a_token_row_by_row():
    svg = ElementTree.fromstring(str(code_map([7, 8, -1, 7], 2)))
    cells = [(g.find("title").text, g.find("rect").attrib) for g in svg.findall("g")]
    assert [(code, rect["x"], rect["y"]) for code, rect in cells] == [
        ("7", "0", "0"),
        ("8", "10", "0"),
        ("7", "10", "10"),
    ]
    assert cells[0][1]["fill"] == cells[2][1]["fill"] == code_colour(7) != cells[1][1]["fill"]
