import csv
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from markupsafe import escape

from tests.commands import command
from tests.data.making import caption_shards
from tests.models import FSQ, IDENTITY
from tests.report.making import ABOUT, Page, make_run, write_lines
from tests.training import retrieval, run_tree
from vqclip.cli.main import main as vqclip_main
from vqclip.errors import ConfigError
from vqclip.evaluation import Result
from vqclip.io.atomic import write_text
from vqclip.quantizers import Prefix
from vqclip.report import write_comparison, write_report
from vqclip.report.frontier import format_points, measure, points_csv, points_page
from vqclip.report.page import search_page
from vqclip.report.run_files import read_run
from vqclip.search.scan import Hit
from vqclip.train import run as train

main = command("report")


def test_the_page_of_a_run_is_reproducible_and_fetches_nothing(tmp_path, folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text()
    page = Page(text)
    assert page.elements.count("svg") >= 10
    assert "Healthy" in page.text
    assert "image: a tower" in page.text
    assert "scenes split train" in page.text
    assert "step 400 of 400" in page.text
    assert "script" not in page.elements
    assert "link" not in page.elements
    # Nothing is fetched: every address is a part of the page, data in it, or the name of a namespace.
    addresses = [value for name, value in page.attributes if name in ("href", "src")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in addresses)
    assert "url(" not in text
    assert write_report(folder, tmp_path / "again.html").read_text() == text


@pytest.mark.parametrize("name", ["about.json", "config.yaml", "metrics.jsonl", "events.jsonl", "best.json"])
def test_damaged_files_and_missing_ones_which_are_named(folder, name):
    for content in (b"", b"\xff\xfe\x00", b"[]", b"{", b'{"a": ' * 5000, b"null", b'"text"'):
        (folder / name).write_bytes(content)
        assert "made" in write_report(folder).read_text() or name == "config.yaml"
    (folder / name).unlink()
    text = Page(write_report(folder).read_text()).text
    assert (f"{name}: no such file" in text) == (name in ("about.json", "config.yaml", "metrics.jsonl"))


def test_a_finished_and_a_stopped_run(tmp_path):
    folder = make_run(tmp_path / "a $(b)'c")
    assert "not finished" in Page(write_report(folder).read_text()).text
    (folder / "about.json").write_text(json.dumps(ABOUT | {"processes": 2}))
    (folder / "summary.json").write_text(json.dumps({"speed": {"images_per_second": 12.0}}))
    text = Page(write_report(folder).read_text()).text
    assert "2 processes · 12 images/s" in text
    assert "torchrun --standalone --nproc-per-node 2 -m vqclip.train --config" in text
    assert "'\"'\"'c'" in text  # quoted for a shell
    (folder / "stopped.json").write_text(json.dumps({"step": 40, "reason": "SIGTERM"}))
    assert "stopped at step 40 (SIGTERM)" in Page(write_report(folder).read_text()).text


def test_what_is_not_the_folder_of_a_run(tmp_path, capsys, refused):
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "nothing")
    assert "expected the folder of a run, such as runs/base" in refused(main([str(tmp_path)]))
    folder = make_run(tmp_path / "run")
    (folder / "tokenizer").mkdir()
    for wrong in (tmp_path, folder / "tokenizer", folder / "config.yaml"):
        with pytest.raises(ConfigError, match=f"did you mean {folder}\\?"):
            read_run(wrong)
    assert main([str(folder), "--out", str(tmp_path / "no" / "such.html")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err
    before = (folder / "config.yaml").read_bytes()
    for output in (folder / "config.yaml", tmp_path / "page.pdf", tmp_path, folder / "checkpoints"):
        assert main([str(folder), "--out", str(output)]) == 2
        assert re.search("out: got .*; expected a file whose name ends in .html", capsys.readouterr().err)
    assert (folder / "config.yaml").read_bytes() == before
    assert main([str(folder)]) == 0
    assert "report.html" in capsys.readouterr().out


def test_a_comparison(tmp_path, refused):
    first = make_run(tmp_path / "first")
    second = make_run(tmp_path / "second", lambda step: {"grad_norm": 0.0})
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("name: made", "name: dead").replace("lr: 0.001", "lr: 1.0"))
    assert "--out: missing" in refused(main([str(first), str(second)]))
    output = tmp_path / "both.html"
    assert main([str(first), str(second), "--out", str(output)]) == 0
    found = Page(output.read_text()).text
    assert "Healthy" in found
    assert "Dead since step 20" in found
    assert "optim.lr 0.001 1.0" in found
    assert "data.sources" not in found  # equal in both
    assert "80.0" in found
    assert "at most 8" in refused(main([*[str(first)] * 9, "--out", str(output)]))


def test_runs_of_one_name_have_their_folders_in_a_comparison(tmp_path):
    folders = [make_run(tmp_path / name) for name in ("first", "second")]
    found = Page(write_comparison(folders, tmp_path / "both.html").read_text()).text
    assert f"made ({folders[0]}), made ({folders[1]})" in found
    assert "The configurations are equal" in found


def test_quality_of_images_is_not_in_percent(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if any(name.startswith("eval/") for name in line):
            line |= {f"eval/decoded/codes_only/{name}": rate for name, rate in (("psnr", 21.5), ("ssim", 0.8))}
    write_lines(folder / "metrics.jsonl", lines)
    found = Page(write_report(folder).read_text())
    labels = [value or "" for name, value in found.attributes if name == "aria-label"]
    assert "decoded (codes only): from 21.5 to 21.5 dB" in labels
    assert "decoded (codes only): from 0.8 to 0.8 SSIM" in labels
    assert "PSNR (dB) 21" not in found.text  # no row among the rates


def test_pages_of_a_search_escape_all_text_and_spell_out_names_that_are_no_utf_8(tmp_path):
    evil = "\"><script>alert('x')</script>"
    text = search_page(evil, [Hit(evil, 0.5), Hit(evil, 0.4, torch.zeros(3, 9, 9, dtype=torch.uint8))], evil)
    assert "<script" not in text
    assert text.count(str(escape(evil))) == 8
    name = os.fsdecode(b"caf\xe9\x1b[2J\n")
    text = search_page(name, [Hit(name, 0.5)], name)
    assert text.count(r"caf\udce9\x1b[2J\n") == 5
    write_text(tmp_path / "page.html", text)


# ---- Accuracy against bits: points, table and page by hand; the command on runs with seeds, and without codes.


RESIDUAL = {"kind": "residual", "layer": FSQ | {"layout": "uniform"}, "depth": 2}


def made(name, *prefixes, rates=(0.9,)):
    """Prefixes and results of each seed: a rate of top-1 for each prefix, or the continuous one."""
    modes = {str(Prefix(*each[:2])): each for each in prefixes}
    known = SimpleNamespace(
        modes={"image": {mode: Prefix(*each[:2]) for mode, each in modes.items()}},
        bits=lambda result, side, mode: modes[mode][2] if side == "image" else 10.0,
    )
    found = []
    for rate in rates:
        figures = {"continuous": {"top1": rate, "top5": 0.99}, "quantized": None, "codes_only": None}
        figures |= {mode: {"top1": rate - lost, "top5": 1.0} for mode, (*_, lost) in modes.items()}
        ends = {mode: {"top1": (0.2, 0.8)} for mode in modes}
        result = Result(name, "zero_shot", figures, {"top1": 0.1, "top5": 0.5}, 20, 10, 10, {}, intervals=ends)
        found.append((known, [result]))
    return found


@pytest.fixture
def points():
    deep = made("colours", (1, 2, 8.0, 0.5), (2, 1, 8.0, 0.25), (2, 2, 16.0, 0.0), rates=(0.75,))
    flat = made("colours", (1, 1, 4.0, 0.0), rates=(0.4, 0.6))
    return measure({"deep": deep, "<b>": flat, "continuous": made("colours")})


def test_table_by_hand(points):
    *heads, last, rule = (lines := format_points(points).splitlines())[:4]
    rows, note = lines[4:-1], lines[-1]
    assert [each.strip() for each in heads] == ["colours,", "codes"]
    assert re.split(r"  +", last) == ["only, %", "ids", "bits/image", "bits/text", "top-1"]
    assert set(rule) == {"-", " "}
    assert [re.split(r"  +", row)[:5] for row in rows[:4]] == [
        ["deep", "1 of 2 stages", "8", "10", "25.0 (20.0–80.0)"],
        ["deep", "1 of 2 codebooks", "8", "10", "50.0 (20.0–80.0)"],
        ["deep", "all ids", "16", "10", "75.0 (20.0–80.0)"],
        ["<b>", "all ids", "4", "10", "50.0 (40.0–60.0)"],
    ]
    assert rows[4].startswith("continuous")
    assert re.split(r"  +", rows[4])[1:4] == ["no codes", "-", "-"]
    assert re.split(r"  +", rows[5]) == ["chance", "10.00"]
    assert note == "In brackets: 95 % intervals over the images of one model and lowest and highest of several seeds"


def test_rows_and_page_have_every_point(points):
    rows = list(csv.DictReader(points_csv(points).splitlines()))
    assert len(rows) == len(points) == 10
    assert {row["rates"] for row in rows if row["group"] == "<b>" and row["figure"] == "top1"} == {"0.4 0.6"}
    assert {row["bits_per_image"] for row in rows if row["group"] == "continuous"} == {""}
    page = points_page(points)
    legend = re.findall(r"<i></i>([^<]*)</li>", page)
    assert legend == ["chance", "deep", "deep, by codebooks", "&lt;b&gt;", "continuous (no codes)"]
    assert page.count("<svg") == 1  # top-5 is no main figure
    assert page == points_page(points)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs ``few-seed-0``, ``few-seed-3`` and ``plain``, without codes."""
    folder = tmp_path_factory.mktemp("frontier")
    caption_shards(folder / "shards", counts=(13,))
    for name, quantizer, seed in (("few-seed-0", RESIDUAL, 0), ("few-seed-3", RESIDUAL, 3), ("plain", IDENTITY, 0)):
        tree = run_tree(
            folder / "runs", folder / "shards", quantizer, run__name=name, run__seed=seed,
            optim__warmup_steps=0, train__steps=1, train__precision="fp32", evaluation=retrieval(folder / "shards"),
        )  # fmt: skip
        train(tree)
    return folder / "runs"


def test_the_command_compares_runs_seeds_and_prefixes(runs, tmp_path, capsys):
    models = [str(runs / name) for name in ("few-seed-0", "few-seed-3", "plain")]
    files = [str(tmp_path / name) for name in ("a.json", "a.csv", "a.html")]
    options = ["--device", "cpu", "--prefixes", "same", "--json", files[0], "--csv", files[1], "--plot", files[2]]
    assert vqclip_main(["evaluate", *models, "evaluation[0].batch_size=5", *options]) == 0
    out = capsys.readouterr().out
    found = json.loads(Path(files[0]).read_text())
    assert found["models"] == {"few": models[:2], "plain": models[2:]}
    ids = [row["ids"] for row in found["points"] if row["figure"] == "i2t_r1"]
    assert ids == ["1 of 2 stages", "all ids", "no codes"]
    assert re.search("few +1 of 2 stages", out)
    whole = {row["figure"]: row for row in found["points"] if row["ids"] == "all ids"}
    alone = []
    for name in models[:2]:
        assert vqclip_main(["evaluate", name, "--device", "cpu", "--json", files[0]]) == 0
        alone.append(json.loads(Path(files[0]).read_text())[0]["figures"]["codes_only"]["i2t_r5"])
    assert whole["i2t_r5"]["rates"] == alone
    assert (whole["i2t_r5"]["low"], whole["i2t_r5"]["high"]) == (min(alone), max(alone))
    assert len(Path(files[1]).read_text().splitlines()) == 1 + len(found["points"])
    assert "<svg" in Path(files[2]).read_text()


def test_other_settings_are_another_group(runs, tmp_path, capsys):
    other = tmp_path / "few-seed-7"
    shutil.copytree(runs / "few-seed-3", other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("lr: 0.001", "lr: 0.002"))
    assert text != (other / "config.yaml").read_text()
    assert vqclip_main(["evaluate", str(runs / "few-seed-0"), str(other), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("all ids") == 2  # without --prefixes no others
    assert "stages" not in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["few-seed-0", "few-seed-0"], "more than once"),
        (["few-seed-0", "--plot", "a.html"], "--plot: got it for all ids of one model"),
        (["few-seed-0", "plain", "--codes", "ids"], "--codes: got it with several models"),
        (["few-seed-0", "--prefixes", "full", "--plot", "a.svg"], "plot: got 'a.svg' (str); expected a file whose"),
        (["few-seed-0", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told(runs, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(runs)
    assert vqclip_main(["evaluate", *arguments, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert (out, told in err) == ("", True), err
