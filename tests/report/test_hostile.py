"""Folders of runs made to break the page, or the browser that shows it."""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.report.making import ABOUT, CONFIG, HEALTH, Page, line, make_run, write_lines
from vqclip.errors import ConfigError
from vqclip.evaluation import Details, Result
from vqclip.evaluation.details import Card, Item, Section, Table
from vqclip.evaluation.results import PixelResult, PixelRow, StoredEvaluation
from vqclip.report import write_comparison, write_report
from vqclip.report.plot import image_uri

EVIL = "\"'><script>x0x()</script><img src=http://x0x.org onerror=x0x()>]]></style></title><!--\u202e{{ 7 * 7 }}\x1b[2J"
ELEMENTS = """html head meta title style body main header footer section nav figure figcaption details summary p h1 h2
h3 h4 ul ol li b i small span br a div pre code table thead tbody tr th td img svg path text circle image"""
ATTRIBUTES = """lang charset http-equiv content name class id href src alt title aria-label role viewbox d x y cx cy r
width height text-anchor preserveaspectratio colspan open style"""
PNG = io.BytesIO()
Image.new("RGB", (4, 4)).save(PNG, "PNG")


def details() -> Details:
    asked = Item(image=PNG.getvalue(), name=EVIL, text=EVIL, note=EVIL)
    found = (asked.model_copy(update={"right": True}), Item(text=EVIL, note=EVIL, right=False))
    card = Card(title=EVIL, note=EVIL, items=(asked, *found, Item(image=b"<svg onload=x0x()>", text=EVIL)))

    def section(layout: Any) -> Section:
        return Section(layout=layout, title=EVIL, note=EVIL, cards=(card,))

    return Details(
        examples=(section("found"), section("found")),
        tables=(Table(title=EVIL, heads=(EVIL, EVIL), rows=((EVIL, EVIL),) * 20, left=1),),
        codes=(section("maps"), section("patches")),
        reconstructions=section("decoded"),
    )


_PAIR = r"-?\d+\.\d -?\d+\.\d"
PATH = re.compile(rf"M{_PAIR}(L{_PAIR})*Z?|M{_PAIR}[HV]-?\d+\.\d")
"""What a browser draws of what `Plot` writes; it stops at the first place that it cannot read."""


def store(folder: Path, found: Details, name: str = EVIL, step: int = 400) -> None:
    rates = {mode: {"i2t_r1": 0.5, EVIL: 0.25} for mode in ("continuous", "quantized", "codes_only")}
    ends = {"codes_only": {"i2t_r1": (0.4, 0.6), EVIL: (0.2, 0.3)}}
    result = Result(name, "retrieval", rates, {"i2t_r1": 0.1}, 9, None, 9, {}, [EVIL], found, intervals=ends)
    (folder / "report" / "00-x.json").write_text(StoredEvaluation(step=step, result=result).model_dump_json())


def store_pixels(folder: Path) -> None:
    """Store an evaluation of decoded images as training does, with hostile texts and numbers."""
    figures = {"psnr": 20.0, "psnr_of_mse": 19.0, "ssim": 0.5}
    rows = [
        PixelRow("codes", 3072.0, None, figures, {}),
        PixelRow("codes, 1 of 2 stages", 1536.0, None, figures | {"psnr": 15.0}, {}),
        PixelRow("WebP", 3000.0, 0.5, figures, {}),
        PixelRow(EVIL, 1e308, 1e308, {EVIL: 1.0, "psnr": -1e308, "ssim": 1e308}, {}),
        PixelRow("mean image", None, None, {}, {}),
    ]
    pixels = PixelResult(reference=EVIL, image_size=10**9, preprocessing=EVIL, rows=rows)
    rates = dict.fromkeys(("continuous", "quantized", "codes_only"), figures | {"id_agreement": 0.25})
    result = Result(EVIL, "pixels", rates, {}, 9, None, 9, {}, [EVIL], details(), pixels=pixels)
    (folder / "report" / "01-x.json").write_text(StoredEvaluation(step=400, result=result).model_dump_json())


def require_harmless(text: str) -> Page:
    """Parse a page; no hostile text has become an element, an attribute or an address."""
    page = Page(text)
    assert set(page.elements) <= set(ELEMENTS.split())
    assert {name for name, _ in page.attributes} <= set(ATTRIBUTES.split())
    for name, value in page.attributes:
        if name in ("href", "src"):
            assert re.fullmatch(r"#[a-z]+|data:image/(png|jpeg);base64,[A-Za-z0-9+/]+=*", value or "")
        if name == "d":
            assert PATH.fullmatch(value or "")
        if name not in ("alt", "title", "aria-label", "src"):  # base64 may contain any letters
            assert "x0x" not in (value or "")
    assert "\u202e" not in text
    assert "\x1b" not in text
    return page


def hostile_run(folder: Path) -> Path:
    make_run(folder, lambda step: {f"loss__{EVIL}": 1, f"image__{EVIL}__usage": 0.5, f"image__{EVIL}__perplexity": 2})
    quoted = json.dumps(EVIL)
    tree = CONFIG.replace("name: made", f"name: {quoted}").replace("split: train", f"split: {quoted}, path: {quoted}")
    (folder / "config.yaml").write_text(tree.replace("kind: convolutional", f"kind: {quoted}, name: {quoted}"))
    captions = {"shown": 9, "cut": 9, "told": EVIL}
    summary = {"name": EVIL, "coverage": EVIL, "processes": 2, "results": [], "captions": captions}
    (folder / "summary.json").write_text(json.dumps(summary))
    about = ABOUT | {"model": [EVIL], "sources": [EVIL], "health": HEALTH | {"loss": f"loss/{EVIL}", "chance": EVIL}}
    (folder / "about.json").write_text(json.dumps(about))
    (folder / "best.json").write_text(json.dumps({"step": {EVIL: EVIL}, "figure": EVIL}))
    (folder / "stopped.json").write_text(json.dumps({"step": 3, "reason": EVIL}))
    bad = {"kind": EVIL, "reason": EVIL, "sample_id": 3}
    write_lines(folder / "bad_samples.jsonl", [{"step": 3, **bad}, {"step": 4, "kind": [EVIL], "reason": {EVIL: 1}}])
    event = {"event": "nonfinite", "reason": EVIL, "applied": EVIL}
    write_lines(folder / "events.jsonl", [{"step": 3, **event}, {"step": 4, "event": {EVIL: EVIL}, "reason": None}])
    store(folder, details())
    store_pixels(folder)
    return folder


def test_hostile_texts_stay_texts(tmp_path):
    folder = hostile_run(tmp_path / "run")
    text = write_report(folder).read_text()
    page = require_harmless(text)
    assert page.text.count("<script>x0x()</script>") > 20
    assert "{{ 7 * 7 }}" in page.text  # no template in a text is run
    assert "no image" in page.text  # for one that is none
    assert page.elements.count("img") >= 8
    assert "stored as bits an image PSNR, dB SSIM codes 3,072 20 0.5" in page.text
    assert "Images decoded from their ids" in page.text
    compared = write_comparison([folder, make_run(tmp_path / "other")], tmp_path / "both.html").read_text()
    assert require_harmless(compared).text.count("x0x()") > 4
    (policy,) = [value for name, value in page.attributes if name == "content" and "default-src" in (value or "")]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def test_what_is_no_small_image_is_not_shown():
    assert image_uri(PNG.getvalue()).startswith("data:image/png;base64,")
    large = io.BytesIO()
    Image.new("1", (6000, 6000)).save(large, "PNG")
    assert large.tell() < 10_000
    gif, several = io.BytesIO(), io.BytesIO()
    Image.new("P", (4, 4)).save(gif, "GIF")
    Image.new("RGB", (4, 4)).save(several, "MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))])
    files = [each.getvalue() for each in (large, gif, several)]
    for content in (None, b"", b"<svg onload=x0x()>", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", *files):
        assert image_uri(content) is None


STORED = [b"{}", b"[]", b"\xff\xfe", b'{"step": 1, "result": {"name": "x"}}', b" " * (17 << 20)]


@pytest.mark.parametrize("forged", STORED)
def test_forged_evaluations_are_left_out_and_named(folder, forged):
    (folder / "report" / "00-x.json").write_bytes(forged)
    page = require_harmless(write_report(folder).read_text())
    assert "report/00-x.json: cannot be read" in page.text


def test_texts_of_a_megabyte_are_cut(folder):
    many = "x" * 10**6
    (folder / "summary.json").write_text(json.dumps({"coverage": many, "results": [{"name": many, "notes": [many]}]}))
    (folder / "best.json").write_text(json.dumps({"step": [many], "figure": many}))
    write_lines(folder / "events.jsonl", [{"step": 3, "event": many[: 10**5], "reason": many[: 10**5]}])
    assert len(write_report(folder).read_text()) < 300_000


NUMBERS: list[Any] = ["NaN", "Infinity", "-Infinity", 1e308, -1e308, 10**400, True, None, [], {}, "x", -0.0, 5e-324]


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_numbers_of_any_kind(tmp_path, number):
    folder = make_run(tmp_path / "run", steps=100)
    names = [name for name in line(0) if name != "step"]
    write_lines(folder / "metrics.jsonl", [{"step": step} | dict.fromkeys(names, number) for step in (1, 2, 2**52)])
    keys = ("processes", "replaced", "speed", "step", "results", "tokens", "captions", "health")
    nested = {"speed": {"images_per_second": number}, "tokens": {"image": number}}
    result = {"name": "a", "figures": {"continuous": {"b": number}}, "samples": number}
    captions = {"shown": number, "cut": number}
    for body in (dict.fromkeys(keys, number), nested | {"captions": captions}, {"results": [result]}):
        (folder / "summary.json").write_text(json.dumps(body))
        require_harmless(write_report(folder).read_text())


def test_pipes_and_folders_in_place_of_files(folder):
    for name in ("metrics.jsonl", "config.yaml"):
        (folder / name).unlink()
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "config.yaml").mkdir()
    text = Page(write_report(folder).read_text()).text
    assert "metrics.jsonl: cannot be read (not a regular file)" in text
    assert "config.yaml: cannot be read" in text


HUGE = 10**400
FORGED: list[tuple[tuple[str | int, ...], Any]] = [
    (("step",), HUGE),
    (("result", "samples"), -1),
    (("result", "details", "tables", 0, "left"), HUGE),
    (("result", "intervals", "codes_only", "i2t_r1"), [0, 2]),
    (("result", "details", "examples", 0, "cards"), [{"items": []}] * 100),
    (("result", "details", "examples", 0, "layout"), EVIL),
    (("result", "details", "examples", 0, "cards", 0, "title"), "x" * 301),
    (("result", "details", "examples", 0, "cards", 0, "items", 0, "image"), "not base64!"),
    (("result", "details", "examples", 0, "cards", 0, "items", 0, "image"), "A" * 200_000),
    (("result", "details", "codes", 0, "cards", 0, "surplus"), 1),
]


@pytest.mark.parametrize(("place", "value"), FORGED, ids=[".".join(map(str, place)) for place, _ in FORGED])
def test_stored_values_beyond_their_limits_are_refused(folder, place, value):
    store(folder, details())
    file = folder / "report" / "00-x.json"
    inner = body = json.loads(file.read_text())
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    file.write_text(json.dumps(body))
    text = require_harmless(write_report(folder).read_text()).text
    assert "cannot be read" in text
    assert ".".join(map(str, place)) in text


def test_forged_settings(tmp_path, folder):
    other = make_run(tmp_path / "other")
    tree = CONFIG.replace("{kind: fsq, levels: [8, 8]}", f"{{kind: fsq, levels: {[2**20 - 1] * 64}}}")
    (folder / "config.yaml").write_text(tree.replace("kind: transformer", "kind: [transformer]"))
    require_harmless(write_report(folder).read_text())
    compared = require_harmless(write_comparison([folder, other], tmp_path / "both.html").read_text())
    assert "model.text.tower.kind" in compared.text
    (folder / "config.yaml").write_text(CONFIG.replace("batch_size: 16", "batch_size: -1"))
    (folder / "summary.json").write_text('{"replaced": 400}')  # as many as there are steps
    assert "400 bad samples" in Page(write_report(folder).read_text()).text


def test_negative_usage_is_no_finding_and_a_best_step_may_lack_its_figure(tmp_path):
    folder = make_run(tmp_path / "run", lambda step: {f"image__{number}__usage": -1e308 for number in range(6)})
    (folder / "checkpoints" / "step-00000400").mkdir(parents=True)
    (folder / "best.json").write_text('{"step": 3}')
    text = require_harmless(write_report(folder).read_text()).text
    assert "Healthy" in text
    assert "Best: step 3 by an unknown figure" in text


def test_a_link_in_place_of_the_page_is_not_followed(tmp_path):
    folder, precious = make_run(tmp_path / "run"), tmp_path / "precious"
    precious.write_text("precious")
    page = folder / "report.html"
    for make in (lambda: page.symlink_to(precious), lambda: os.mkfifo(page), page.mkdir):
        make()
        with pytest.raises(ConfigError, match=r"report.html: is a link, a folder or a pipe; .* --out FILE"):
            write_report(folder)
        page.rmdir() if page.is_dir() else page.unlink()
    assert precious.read_text() == "precious"
    write_report(folder)
    write_report(folder)
