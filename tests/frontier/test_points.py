"""Points, table, files and plot of accuracy against bits, by hand."""

from __future__ import annotations

import csv
import json
import re

import pytest

from vqclip.frontier import Frontier, Point, save


def point(group, stages, codebooks, bits, rate, figure="top1", **changes):
    known = {
        "task": "colours", "bits_per_text": 10.0, "low": rate - 0.1, "high": rate + 0.1, "rates": [rate],
        "chance": 0.1, "main": True,
    }  # fmt: skip
    return Point(
        figure=figure, group=group, stages=stages, codebooks=codebooks, bits_per_image=bits, rate=rate,
        **(known | changes),
    )  # fmt: skip


@pytest.fixture
def made():
    points = [
        point("deep", 1, 2, 8.0, 0.25),
        point("deep", 2, 1, 8.0, 0.5),
        point("deep", 2, 2, 16.0, 0.75),
        point("deep", 2, 2, 16.0, 0.99, figure="top5", main=False),
        point("_plain $x$", 1, 1, 4.0, 0.5, rates=[0.4, 0.6], low=0.4, high=0.6),
        point("continuous", None, None, None, 0.9, bits_per_text=None),
    ]
    return Frontier(points, {"deep": ["runs/a"], "_plain $x$": ["runs/b", "runs/c"], "continuous": ["runs/d"]})


def test_table_by_hand(made):
    head, rule, *rows, note = str(made).splitlines()
    assert re.split(r"  +", head) == ["colours, codes only, %", "ids", "bits/image", "bits/text", "top-1"]
    assert set(rule) == {"-", " "}
    assert [re.split(r"  +", row) for row in rows] == [
        ["deep", "1 of 2 stages", "8", "10", "25.0 (15.0–35.0)"],
        ["deep", "1 of 2 codebooks", "8", "10", "50.0 (40.0–60.0)"],
        ["deep", "all ids", "16", "10", "75.0 (65.0–85.0)"],
        ["_plain $x$", "all ids", "4", "10", "50.0 (40.0–60.0)"],
        ["continuous", "no codes", "-", "-", "90.0 (80.0–100.0)"],
        ["chance", "10.00"],
    ]
    assert note == "In brackets: 95 % intervals over the images of one run and lowest and highest of several seeds"


def test_files_have_every_figure(made, tmp_path):
    files = save(made, tmp_path / "new" / "out")
    assert [file.name for file in files] == ["frontier.json", "frontier.csv", "frontier.svg", "frontier.png"]
    body = json.loads(files[0].read_text())
    assert [Point(**each) for each in body["points"]] == made.points
    assert body["runs"] == made.runs
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert len(rows) == len(made.points)
    assert rows[4]["rates"] == "0.4 0.6"
    assert rows[5]["bits_per_image"] == ""
    assert files[3].read_bytes().startswith(b"\x89PNG")
    before = files[2].read_bytes()
    assert save(made, tmp_path / "new" / "out")[2].read_bytes() == before  # equal points, equal bytes


def test_plot_has_lines_intervals_chance_and_names_that_are_no_formula(made, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, content, **_: figures.append(self))
    save(made, tmp_path)
    figure = figures[0]
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_title()) == ("log", "colours")
    labels = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert labels == ["chance", "deep, by stages", "deep, by codebooks", "_plain $x$", "continuous (no codes)"]
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())
    chance, *_ = axes.get_lines()
    assert set(chance.get_ydata()) == {10.0}
    assert [line.get_linestyle() for line in axes.get_lines() if set(line.get_ydata()) == {90.0}] == ["--"]
    by_stages, by_codebooks, *_ = axes.containers
    assert (by_stages[0].get_linestyle(), by_codebooks[0].get_linestyle()) == ("-", "-.")
    assert by_stages[0].get_xydata().tolist() == [[8, 25], [16, 75]]
    assert [segment.tolist() for segment in by_stages[2][0].get_segments()] == [
        [[8, pytest.approx(15)], [8, pytest.approx(35)]], [[16, pytest.approx(65)], [16, pytest.approx(85)]]
    ]  # fmt: skip
