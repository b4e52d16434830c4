"""Every block of code in README.md and docs/ is run, or at least read by what would run it.

- ``python``: run in order, a page's blocks in one namespace, in a folder of small things (`tests.docs.place`).
- ``bash``: every command's options, configuration and overrides are read by its own parser; below ``<!-- run -->`` the
  commands run, a training for two steps.
- ``yaml``: read as part of a configuration. ``json``: read. ``text``: for output, left alone.

A block that cannot be run has ``<!-- not run: reason -->`` directly above it, and stands in `NOT_RUN`.

markdown-it-py finds the blocks; the libraries that also run them (pytest-markdown-docs, mktestdocs, sybil) know Python
alone, or run others as they stand, where nearly all of ours are commands that must be read without being run.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of
from tests.docs.commands import calls_of, check
from tests.docs.fragments import check_fragment
from tests.docs.place import make_place, names

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


SLOW = ("docs/export.md",)
"""Pages whose blocks take long; the others show that blocks run."""


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if name_of(p) in SLOW else ()) for p in WITH_CODE], ids=name_of
)
def test_blocks_run(page, place):
    run_page(page.read_text(encoding="utf-8"), name_of(page), place)


def test_blocks_that_are_not_run_are_known():
    found = [
        f"{name_of(page)}: {block.why_not_run}"
        for page in WITH_CODE
        for block in blocks_of(page.read_text(encoding="utf-8"))
        if block.why_not_run is not None
    ]
    assert found == NOT_RUN


def fence(language: str, source: str, above: str = "") -> str:
    return f"{above}\n```{language}\n{textwrap.dedent(source)}\n```\n"


BROKEN = {
    "python": (fence("python", "assert images == []"), "page.md:3: AssertionError"),
    "later python": (fence("python", "y = 1") + fence("python", "assert y == 2"), "page.md:7: AssertionError"),
    "override": (fence("bash", "python -m vqclip.train --config configs/base.yaml optim.warmup_step=1"), "unknown key"),
    "configuration": (fence("bash", "vqclip train --config configs/bose.yaml"), "configs/bose.yaml"),
    "torchrun": (fence("bash", "torchrun --nproc-per-machine 2 -m vqclip.train"), "--nproc-per-machine"),
    "under torchrun": (fence("bash", "torchrun --standalone -m vqclip.train --config configs/base.yaml a=1"), "a: unk"),
    "script": (fence("bash", "python scripts/zero_shot.py runs/base --kinds scenes"), "--kinds"),
    "no script": (fence("bash", "python scripts/one_shot.py runs/base"), "no such file"),
    "module": (fence("bash", "vqclip data draw --sheet x.png"), "--sheet"),
    "run": (fence("bash", "python scripts/zero_shot.py runs/none --kind scenes", "<!-- run -->"), "runs/none"),
    "target": (fence("bash", "make trian"), "trian"),
    "through make": (fence("bash", "make train ARGS=run.sed=1"), "run.sed: unknown key"),
    "extra": (fence("bash", "pip install 'vqclip[remot]'"), "vqclip[remot]"),
    "bash": (fence("bash", "if true; then make train"), "syntax error"),
    "program": (fence("bash", "vqclap train"), "vqclap"),
    "yaml": (fence("yaml", "train: {micro_batch: 8}"), "unknown key"),
    "yaml key": (fence("yaml", "model: {image: {widht: 8}}"), "unknown key"),
    "yaml kind": (fence("yaml", "model: {image: {quantizer: {kind: fsk}}}"), "fsk"),
    "json": (fence("json", "{"), "JSONDecodeError"),
    "language": (fence("pyton", "1"), "got language 'pyton'"),
    "indented": ("text\n\n    make train\n", "expected a fence"),
}


def test_a_broken_block_is_noticed(place):
    for name, (text, message) in BROKEN.items():
        with pytest.raises((AssertionError, ValueError)) as error:
            run_page(text, "page.md", place)
        assert message in str(error.value), name
