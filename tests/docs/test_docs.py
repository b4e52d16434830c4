"""Every block of code in README.md and docs/ is run, or at least read by what would run it.

- ``python``: run in order, a page's blocks in one namespace, in a folder of small things (`tests.docs.place`).
- ``bash``: every command's options, configuration and overrides are read by its own parser; below ``<!-- run -->`` the
  commands run, a training for two steps.
- ``yaml``: read as part of a configuration. ``json``: read. ``text``: for output, left alone.

A block that cannot be run has ``<!-- not run: reason -->`` directly above it, and stands in `NOT_RUN`.

markdown-it-py finds the blocks; the libraries that also run them (pytest-markdown-docs, mktestdocs, sybil) know Python
alone, or run others as they stand, where nearly all of ours are commands that must be read without being run.
"""

import json
import re
import runpy
import shutil
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from markdown_it import MarkdownIt
from PIL import Image

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of
from tests.docs.commands import calls_of, check
from tests.docs.fragments import check_fragment
from tests.docs.place import make_place, names
from tests.models import PRODUCT, tiny_model
from tests.training import run_tree

NOT_RUN: list[str] = [
    "docs/frontier.md: trains six runs",
    "docs/gpu.md: needs the bundle, and another machine",
    "docs/mteb.md: needs mteb and the network",
    "docs/reuse.md: needs the hub",
]
"""``page: reason`` of every block that nothing runs."""

WITH_CODE = [page for page in PAGES if blocks_of(page.read_text(encoding="utf-8"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VQCLIP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield make_place(tmp_path_factory.mktemp("docs"))


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of the made folder, in which the test runs."""
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "place", symlinks=True))
    threads = torch.get_num_threads()
    yield tmp_path / "place"
    torch.set_num_threads(threads)  # a command sets that of its process


def run_block(block: Block, namespace: dict[str, object], page: str, place: Path) -> None:
    if block.language == "python":
        exec(compile("\n" * (block.line - 1) + block.source, page, "exec"), namespace)
    elif block.language == "bash":
        calls = calls_of(block.source, place)
        for call in calls:
            check(call, run=block.note == "run")
    elif block.language == "yaml":
        check_fragment(block.source, place)
    elif block.language == "json":
        json.loads(block.source)
    elif block.language != "text":
        raise ValueError(f"got language {block.language!r}; expected python, bash, yaml, json, or text for output")


def run_page(text: str, page: str, place: Path) -> None:
    namespace = names(page)
    for block in blocks_of(text):
        if block.why_not_run is None:
            try:
                run_block(block, namespace, page, place)
            except Exception as error:
                raise AssertionError(f"{page}:{block.line}: {type(error).__name__}: {error}\n{block.source}") from error


SLOW = {"docs/export.md": pytest.mark.slow}


@pytest.mark.parametrize("page", [pytest.param(p, marks=SLOW.get(name_of(p), ())) for p in WITH_CODE], ids=name_of)
def test_blocks_run(page, place):
    run_page(page.read_text(encoding="utf-8"), name_of(page), place)


def test_blocks_that_are_not_run_are_known():
    blocks = [(page, block) for page in WITH_CODE for block in blocks_of(page.read_text(encoding="utf-8"))]
    assert [f"{name_of(page)}: {each.why_not_run}" for page, each in blocks if each.why_not_run is not None] == NOT_RUN


def fence(language: str, source: str, above: str = "") -> str:
    return f"{above}\n```{language}\n{textwrap.dedent(source)}\n```\n"


BROKEN = {
    "python": (fence("python", "assert images == []"), "page.md:3: AssertionError"),
    "override": (fence("bash", "python -m vqclip.train --config configs/base.yaml optim.warmup_step=1"), "unknown key"),
    "torchrun": (fence("bash", "torchrun --nproc-per-machine 2 -m vqclip.train"), "--nproc-per-machine"),
    "script": (fence("bash", "python scripts/zero_shot.py runs/base --kinds scenes"), "--kinds"),
    "module": (fence("bash", "vqclip data draw --sheet x.png"), "--sheet"),
    "target": (fence("bash", "make trian"), "trian"),
    "extra": (fence("bash", "pip install 'vqclip[remot]'"), "vqclip[remot]"),
    "bash": (fence("bash", "if true; then make train"), "syntax error"),
    "yaml": (fence("yaml", "train: {micro_batch: 8}"), "unknown key"),
    "json": (fence("json", "{"), "JSONDecodeError"),
    "language": (fence("pyton", "1"), "got language 'pyton'"),
    "indented": ("text\n\n    make train\n", "expected a fence"),
}


def test_a_broken_block_is_noticed(place):
    for name, (text, message) in BROKEN.items():
        with pytest.raises((AssertionError, ValueError)) as error:
            run_page(text, "page.md", place)
        assert message in str(error.value), name


# Links between the pages of the repository lead to files that exist.

LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def links_of(text: str) -> list[str]:
    """Where the links and images of a page lead, as they are written; those of HTML last."""
    blocks = MarkdownIt().parse(text)
    inline = [token for block in blocks for token in block.children or ()]
    html = "".join(token.content for token in [*blocks, *inline] if token.type in ("html_block", "html_inline"))
    targets = [str(target) for token in inline if (target := token.attrs.get("href") or token.attrs.get("src"))]
    return targets + re.findall(r'\b(?:href|src|srcset)="([^" ]+)"', html)


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_relative_links_lead_to_files(page):
    parts = [urlsplit(link) for link in links_of(page.read_text(encoding="utf-8"))]
    paths = [unquote(part.path) for part in parts if not part.scheme and not part.netloc and part.path]
    assert [path for path in paths if not (page.parent / path).exists()] == []


# CONTRIBUTING names every package, and what the documentation says of the tree exists.

SOURCE = ROOT / "src" / "vqclip"
TOUR = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A tour")[2].partition("\n## ")[0]
KNOWN = re.compile(r"(?:test_[a-z_0-9]+\.py)?::(?:\w+::)?(test_\w+)")


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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_tests_and_documents_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"\btests/[\w/]+\.py", text)
    if page.name == "security.md":
        files += [f"tests/{name}" for name in re.findall(r"`((?:\w+/)*(?:test_\w+|fuzz/\w+)\.py)", text)]
        assert len(files) > 20
    assert [name for name in files if not (ROOT / name).is_file()] == []
    if functions := KNOWN.findall(text):
        tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
        assert [name for name in functions if f"def {name}" not in tests] == []
    assert page.parent.name == "adr" or "DESIGN" not in text


# The README's images: both are there for light and dark pages, and show what its table says.

README = (ROOT / "README.md").read_text(encoding="utf-8")
IMAGES = sorted((ROOT / "docs" / "images").glob("*.png"))
FIGURES = [path for path in IMAGES if not path.name.startswith("reconstructed")]
"""Images of the run of `make train`."""


def test_each_image_is_small_and_has_a_light_and_a_dark_variant():
    names = [f"{name}-{theme}.png" for name in ("idea", "reconstructed", "result") for theme in ("dark", "light")]
    assert [path.name for path in IMAGES] == names
    assert all(path.stat().st_size < 200_000 for path in IMAGES)
    for name in ("idea", "result"):
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="docs/images/{name}-dark.png">'
        light = rf'\s+<img src="docs/images/{name}-light.png" [^>]*alt="[^"]{{50,}}"'
        assert re.search(re.escape(dark) + light, README)


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_the_table_has_the_figures_of_the_images(path):
    rows = json.loads(Image.open(path).info["Comment"])["figures"]
    assert len(rows) == 3
    assert [row for name, *rates in rows if (row := f"| {name} | {' | '.join(map(str, rates))} |") not in README] == []


def draw(run, out, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["readme_images.py", str(run), "--out", str(out), *arguments])
    runpy.run_path(str(ROOT / "scripts" / "readme_images.py"), run_name="__main__")


def test_a_folder_without_a_finished_run_is_named(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"^error: .*none: contains no summary.json; .*make train"):
        draw(tmp_path / "none", tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    run, rates = tmp_path / "run", {"top1": 0.5, "t2i_r1": 0.25}
    tiny_model(PRODUCT, PRODUCT).build().eval().save_pretrained(run / "tokenizer")
    (run / "config.yaml").write_text(json.dumps(run_tree(tmp_path, tmp_path, run__name="one")))
    results = [
        {"name": kind, "kind": kind, "classes": 3, "samples": 4, "chance": rates}
        | {"figures": {"continuous": rates, "codes_only": rates}}
        for kind in ("zero_shot", "retrieval")
    ]
    (run / "summary.json").write_text(json.dumps({"results": results, "step": 2, "bits_per_sample": {"image": 48.0}}))
    for out in ("first", "second"):
        draw(run, tmp_path / out, monkeypatch)
    torch.set_num_threads(threads)
    first, second = (sorted((tmp_path / out).iterdir()) for out in ("first", "second"))
    assert [path.name for path in first] == [path.name for path in FIGURES]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    rows = json.loads(Image.open(first[-1]).info["Comment"])["figures"]
    assert rows == [["zero_shot, 3 classes", 50.0, 50.0, 50.0], ["captions to 4 images", 25.0, 25.0, 25.0]]
