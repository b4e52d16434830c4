from __future__ import annotations

import json
import os

import pytest
import torch
from markupsafe import escape

from tests.commands import command
from tests.report.making import Page, make_run, write_lines
from vqclip.errors import ConfigError
from vqclip.io.atomic import write_text
from vqclip.report import write_comparison, write_report
from vqclip.report.images import find_grid
from vqclip.report.page import search_page
from vqclip.report.run_files import read_run
from vqclip.search.scan import Hit

main = command("report")


def test_the_page_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run")
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text()
    page = Page(text)
    assert page.elements.count("svg") >= 10
    assert "Healthy" in page.text
    assert "16 codebooks" not in page.text
    assert "6 codebooks of FSQ 8×8 (64 codes)" in page.text
    assert "step 400 of 400" in page.text
    assert "script" not in page.elements
    assert "link" not in page.elements
    # Nothing is fetched: every address is a part of the page, data in it, or the name of a namespace.
    addresses = [value for name, value in page.attributes if name in ("href", "src")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in addresses)
    assert "url(" not in text


def test_the_page_is_reproducible(tmp_path):
    folder = make_run(tmp_path / "run")
    first = write_report(folder, tmp_path / "a.html").read_bytes()
    assert write_report(folder, tmp_path / "b.html").read_bytes() == first


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_missing_part_is_left_out_and_named(tmp_path, name):
    folder = make_run(tmp_path / "run")
    (folder / name).unlink()
    assert f"{name}: no such file" in Page(write_report(folder).read_text()).text


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "events.jsonl", "best.json"])
def test_damaged_files(tmp_path, name):
    folder = make_run(tmp_path / "run")
    for content in (b"", b"\xff\xfe\x00", b"[]", b"{", b'{"a": ' * 5000, b"null", b'"text"'):
        (folder / name).write_bytes(content)
        assert "made" in write_report(folder).read_text() or name == "config.yaml"


def test_a_finished_and_a_stopped_run(tmp_path):
    folder = make_run(tmp_path / "run")
    assert "not finished" in Page(write_report(folder).read_text()).text
    (folder / "summary.json").write_text(json.dumps({"processes": 2, "speed": {"images_per_second": 12.0}}))
    text = Page(write_report(folder).read_text()).text
    assert "2 processes · 12 images/s" in text
    assert "torchrun --standalone --nproc-per-node 2 -m vqclip.train --config" in text
    (folder / "stopped.json").write_text(json.dumps({"step": 40, "reason": "SIGTERM"}))
    assert "stopped at step 40 (SIGTERM)" in Page(write_report(folder).read_text()).text


def test_what_is_not_the_folder_of_a_run(tmp_path, capsys):
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "nothing")
    assert main([str(tmp_path)]) == 2
    assert "expected the folder of a run, such as runs/base" in capsys.readouterr().err
    folder = make_run(tmp_path / "run")
    (folder / "tokenizer").mkdir()
    for wrong in (tmp_path, folder / "tokenizer", folder / "config.yaml"):
        with pytest.raises(ConfigError, match=f"did you mean {folder}\\?"):
            read_run(wrong)
    assert main([str(folder), "--out", str(tmp_path / "no" / "such.html")]) == 2
    assert f"but there is no folder {tmp_path / 'no'}" in capsys.readouterr().err
    before = (folder / "config.yaml").read_bytes()
    for output in (folder / "config.yaml", tmp_path / "page.pdf", tmp_path, folder / "checkpoints"):
        assert main([str(folder), "--out", str(output)]) == 2
        assert f"--out: got {output}; expected a file whose name ends in .html" in capsys.readouterr().err
    assert (folder / "config.yaml").read_bytes() == before
    assert main([str(folder)]) == 0
    assert "report.html" in capsys.readouterr().out


def test_commands_are_quoted_for_a_shell(tmp_path):
    folder = make_run(tmp_path / "a $(b)'c")
    assert "'\"'\"'c'" in Page(write_report(folder).read_text()).text


def test_a_comparison(tmp_path, capsys):
    first = make_run(tmp_path / "first")
    second = make_run(tmp_path / "second", lambda step: {"grad_norm": 0.0})
    text = (
        (second / "config.yaml").read_text().replace("name: made", "name: dead").replace("warmup_steps: 5", "lr: 1.0")
    )
    (second / "config.yaml").write_text(text)
    assert main([str(first), str(second)]) == 2
    assert "--out: missing" in capsys.readouterr().err
    output = tmp_path / "both.html"
    assert main([str(first), str(second), "--out", str(output)]) == 0
    found = Page(output.read_text()).text
    assert "Healthy" in found
    assert "Dead since step 20" in found
    assert "optim.lr – 1.0" in found
    assert "data.sources" not in found  # equal in both
    assert "80.0" in found
    assert main([*[str(first)] * 9, "--out", str(output)]) == 2
    assert "at most 8" in capsys.readouterr().err


def test_runs_of_one_name_have_their_folders_in_a_comparison(tmp_path):
    folders = [make_run(tmp_path / name) for name in ("first", "second")]
    found = Page(write_comparison(folders, tmp_path / "both.html").read_text()).text
    assert f"made ({folders[0]}), made ({folders[1]})" in found
    assert "The configurations are equal" in found


def test_quality_of_images_is_not_in_percent(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text("{task: pixels, tokenizer: runs/base/tokenizer, decoder: {kind: transformer}}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if any(name.startswith("eval/") for name in line):
            line |= {f"eval/decoded/codes_only/{name}": rate for name, rate in (("psnr", 21.5), ("ssim", 0.8))}
    write_lines(folder / "metrics.jsonl", lines)
    found = Page(write_report(folder).read_text())
    labels = [value or "" for name, value in found.attributes if name == "aria-label"]
    assert "decoded (codes only): from 21.5 to 21.5 dB" in labels
    assert "decoded (codes only): from 0.8 to 0.8 SSIM" in labels
    assert "transformer pixel decoder for the ids of runs/base/tokenizer" in found.text
    assert "PSNR (dB) 21" not in found.text  # no row among the rates


@pytest.mark.parametrize(("tokens", "grid"), [(16, (4, 4)), (12, (3, 4)), (7, (1, 7)), (1, (1, 1)), (0, (1, 1))])
def test_tokens_fill_a_grid(tokens, grid):
    assert find_grid(tokens) == grid


def test_pages_of_a_search_escape_all_text():
    evil = "\"><script>alert('x')</script>"
    text = search_page(evil, [Hit(evil, 0.5), Hit(evil, 0.4, torch.zeros(3, 9, 9, dtype=torch.uint8))], evil)
    assert "<script" not in text
    assert text.count(str(escape(evil))) == 6


def test_names_that_are_no_utf_8_are_spelt_out(tmp_path):
    name = os.fsdecode(b"caf\xe9\x1b[2J\n")
    text = search_page(name, [Hit(name, 0.5)], name)
    assert text.count(r"caf\udce9\x1b[2J\n") == 4
    write_text(tmp_path / "page.html", text)
