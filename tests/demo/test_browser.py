"""The page as a visitor uses it, in headless Chromium.

Needs playwright (``pip install playwright``) and Chromium: ``VQCLIP_CHROMIUM`` is its path, or it is on the ``PATH``.
Screenshots are kept in the folder ``VQCLIP_SCREENSHOTS``, if that is set.
"""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.data.making import encode, pixels
from tests.demo.serving import serving
from tests.search.making import built, pictures
from vqclip.cli.search import main as search

pytest.importorskip("gradio", reason="Gradio is not installed (extra demo)")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("VQCLIP_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; VQCLIP_CHROMIUM is its path"),
]

EVIL = "<img src=x onerror=document.title='evil'> ${document.title='evil'} {{this}} **bold**"
DROP = """([selector, name, data]) => {
    const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, {type: "image/png"}));
    document.querySelector(selector).dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
}"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    torch.manual_seed(0)
    built().save_pretrained(folder / "tokenizer")
    images, index = pictures(folder / "pictures"), folder / "index"
    assert (
        search(["build", "--tokenizer", str(folder / "tokenizer"), "--images", str(images), "--out", str(index)]) == 0
    )
    with serving(str(folder / "tokenizer"), "--index", str(index), "--images", str(images)) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, demo, width: int, scheme: str):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(demo.address)
    page.wait_for_selector("#image button", timeout=30_000)
    return page


def drop(page, name: str, data: bytes) -> None:
    page.evaluate(DROP, ["#image button", name, base64.b64encode(data).decode()])


def keep(page, name: str) -> None:
    if folder := os.environ.get("VQCLIP_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_an_image_is_dropped_a_caption_and_classes_are_typed(demo, browser, width, scheme):
    page = open_page(browser, demo, width, scheme)
    title = page.title()
    drop(page, "image.png", encode(pixels(0), "PNG"))
    page.wait_for_selector("#image-codes .vq-panel")
    page.fill("#caption textarea", EVIL)
    page.press("#caption textarea", "Enter")
    page.wait_for_selector("#caption-codes .vq-tokens")
    page.fill("#template textarea", "{c}")
    page.fill("#classes textarea", f"cat\n{EVIL}")
    page.click("#classes button")
    page.wait_for_selector("#probabilities .vq-classes")
    page.click(".vq-panel")
    page.wait_for_selector("#nearest .vq-hits img >> nth=15")
    keep(page, f"demo-{scheme}-{width}")
    assert page.input_value("#image-ids textarea").startswith("[[")
    assert EVIL in page.inner_text("#probabilities")
    assert page.locator("#probabilities img").count() == 0
    assert page.locator(".code-map .code").first.is_visible()
    assert page.title() == title
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert [url for url in page.asked if not url.startswith((demo.address, "data:", "blob:"))] == []
    page.context.close()


def test_files_of_no_use_are_refused_in_words(demo, browser):
    image = encode(pixels(0), "PNG")
    page = open_page(browser, demo, 1280, "light")
    drop(page, "broken.png", image[:-30])
    page.wait_for_selector("#image-codes .vq-notice")
    assert "png image cannot be decoded: it is cut short" in page.inner_text("#image-codes")
    keep(page, "demo-broken")
    page.click("#image button[aria-label*=Remove]")
    page.wait_for_selector("#image-codes .vq-notice", state="detached")
    drop(page, "paper.png", b"%PDF-1.7")
    page.wait_for_selector("#image-codes .vq-notice")
    assert "not a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF image" in page.inner_text("#image-codes")
    page.fill("#classes textarea", ",".join(map(str, range(10_000))))
    page.click("#classes button")
    page.wait_for_selector("#probabilities .vq-notice")
    assert "got 10,000; expected at most 1,000" in page.inner_text("#probabilities")
    assert "Error" not in page.inner_text("body")
    page.context.close()


def test_a_file_that_is_too_large_is_refused_in_words(demo, browser, tmp_path):
    page = open_page(browser, demo, 1280, "light")
    (tmp_path / "huge.png").write_bytes(bytes(21 << 20))
    page.set_input_files("#image input[type=file]", tmp_path / "huge.png")
    page.wait_for_selector(".toast-body")
    assert "maximum allowed size of 20" in page.inner_text(".toast-body >> nth=0")
    assert not page.locator(".toast-title").first.is_visible()
    page.context.close()
