from __future__ import annotations

import re

import pytest

from vqclip.report.images import code_colour, find_grid


def test_a_code_has_one_colour_and_near_codes_have_others():
    colours = [code_colour(code) for code in range(256)]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert len(set(colours)) > 250
    assert code_colour(2**62) == code_colour(2**62)


@pytest.mark.parametrize(("tokens", "grid"), [(16, (4, 4)), (12, (3, 4)), (7, (1, 7)), (1, (1, 1)), (0, (1, 1))])
def test_tokens_fill_a_grid(tokens, grid):
    assert find_grid(tokens) == grid
