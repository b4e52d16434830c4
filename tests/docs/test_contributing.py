"""CONTRIBUTING names every package, and what the documentation says of the tree exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import PAGES, ROOT

SOURCE = ROOT / "src" / "vqclip"
TOUR = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A tour")[2].partition("\n## ")[0]
KNOWN = re.compile(r"(?:test_[a-z_0-9]+\.py)?::(?:\w+::)?(test_\w+)")
PAGES_WITH_TESTS = [page for page in (*PAGES, ROOT / "CONTRIBUTING.md") if KNOWN.search(page.read_text("utf-8"))]


def test_the_map_names_every_package_and_nothing_else():
    named = set(re.findall(r"`([a-z_]+)(?:/|\.py)`", TOUR))
    parts = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    parts |= {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
    assert named - {"base"} == parts


def test_the_files_and_functions_of_the_tour_exist():
    for line in TOUR.splitlines():
        files = [SOURCE / name for name in re.findall(r"`((?!tests)[a-z_]+/[a-z_/]+\.py)`", line)]
        assert [file for file in files if not file.is_file()] == []
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        names = re.findall(r"\(`(?:dist\.)?([a-z_]+)`", line) + re.findall(r", `dist\.([a-z_]+)`", line)
        assert [name for name in names if f"{name}(" not in text] == []


@pytest.mark.parametrize("page", PAGES_WITH_TESTS, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page):
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in KNOWN.findall(page.read_text(encoding="utf-8")) if f"def {name}" not in tests]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_of_tests_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\btests/[\w/]+\.py", text)
    if page.name == "security.md":
        named += [f"tests/{name}" for name in re.findall(r"`((?:\w+/)*(?:test_\w+|fuzz/\w+)\.py)", text)]
        assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "adr"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_no_page_refers_to_a_document_that_is_not_here(page):
    assert "DESIGN" not in page.read_text(encoding="utf-8")
