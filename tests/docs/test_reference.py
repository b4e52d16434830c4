"""The reference: every public name has a docstring and a place on one of its pages."""

import importlib
import re
import subprocess
import sys
import zlib

import griffe
import pytest

from tests.docs.blocks import ROOT

REQUIRED = ("vqclip", "vqclip.quantizers", "vqclip.losses", "vqclip.dist", "vqclip.data")
REFERENCE = ROOT / "docs" / "reference"
TEXT = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
NAMED = sorted(re.findall(r"^::: (\S+)$", TEXT, re.MULTILINE))
"""What the pages document: modules, or single things in them."""


@pytest.fixture(scope="module")
def package() -> griffe.Module:
    """The package as the documentation's generator reads it: without importing it."""
    package = griffe.load("vqclip", search_paths=[str(ROOT / "src")])
    assert isinstance(package, griffe.Module)
    return package


def found_in(package: griffe.Module, path: str) -> griffe.Object | griffe.Alias:
    _, _, rest = path.partition(".")
    return package[rest] if rest else package


def public_names(package: griffe.Module, module: str) -> list[str]:
    """Those that a module exports; modules in it are left out, and what only Python calls, such as ``__getattr__``."""
    members = found_in(package, module).members.items()
    called = ("__getattr__", "__dir__")
    return [name for name, member in members if member.is_public and not member.is_module and name not in called]


@pytest.mark.parametrize("name", NAMED)
def test_named_things_exist_and_public_names_have_docstrings(name, package):
    found = found_in(package, name)
    if not name.split(".")[-1][0].isupper():
        names = public_names(package, name)
        assert names
        assert [each for each in names if not found[each].has_docstring] == []


@pytest.mark.parametrize("module", REQUIRED)
def test_a_page_has_what_the_module_exports(module, package):
    assert module in NAMED
    runtime = importlib.import_module(module)
    names = public_names(package, module)
    assert set(getattr(runtime, "__all__", names)) == set(names)
    for name in names:
        assert hasattr(runtime, name)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_holds_every_name(package, tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    inventory = zlib.decompress((tmp_path / "site" / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    places = {line.split()[0] for line in inventory.splitlines()}
    for module in REQUIRED:
        assert {f"{module}.{name}" for name in public_names(package, module)} <= places
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    fetched = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+rel=\"?(?:styles|precon)[^>]+https?:")
    assert [page for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []
