"""The page in Gradio, with Gradio's own queue, limits and display of errors."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from PIL import Image
from torch import Tensor

from vqclip.data import mask_credentials
from vqclip.data.sources.class_names import DEFAULT_TEMPLATE
from vqclip.demo.answers import Answers, Coded
from vqclip.errors import ConfigError, VqclipError, import_extra, printable
from vqclip.evaluation.details import draw_map, find_grid
from vqclip.evaluation.image_details import codebook_names

T = TypeVar("T")
_CSS = """
.tiles .grid-wrap {min-height: 0; max-height: none}
.tiles .grid-container {grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)) !important}
"""
"""Rows of as many images as fit, and all rows."""
_MAPS, _NEAREST, _CLASSES = 64, 8, 20
"""Largest numbers of code maps, items of the index and classes that are shown."""


def build_page(folder: str, answers: Answers) -> Any:
    """Return the page, a `gradio.Blocks`. The server keeps nothing of a visitor but uploads, an hour at most.

    Args:
        folder: name of the model's folder.
        answers: its tokenizers, and an index.
    """
    import gradio as gr

    def ask(compute: Callable[..., T], *given: Any) -> T:
        """Show a refusal in Gradio's way."""
        try:
            return compute(*given)
        except VqclipError as error:
            raise gr.Error(mask_credentials(str(error))) from error

    def show_image(data: bytes | None) -> list[Any]:
        if data is None:
            return [None, None, "", None]
        coded, pixels = ask(answers.of_image, data)
        assert answers.image is not None
        tokens, codebooks = coded.ids.shape
        bits = tokens * answers.image.quantizer.bits
        cost = f"{tokens} tokens x {codebooks} codebooks: {bits:,.0f} bits; the file has {8 * len(data):,}"
        names, columns = codebook_names(answers.image.quantizer), find_grid(tokens)[1]
        maps = [(_picture(pixels), "the image")]
        for codebook, name in enumerate(names[:_MAPS]):
            drawn = draw_map(coded.ids[:, codebook].tolist(), columns)
            maps.append((drawn.resize((16 * drawn.width, 16 * drawn.height), Image.Resampling.NEAREST), name))
        return [maps, coded.to_json(), cost, show_nearest(coded)]

    def show_caption(caption: str, data: bytes | None) -> list[Any]:
        if not caption.strip():
            return [None, "", "", None]
        coded, pieces = ask(answers.of_caption, caption)
        assert answers.text is not None
        note = f"{len(coded.ids)} tokens: {len(coded.ids) * answers.text.quantizer.bits:,.0f} bits"
        if data is not None and answers.image is not None:
            image, _ = ask(answers.of_image, data)
            continuous, codes = (
                float(getattr(coded, key) @ getattr(image, key)) for key in ("continuous", "codes_only")
            )
            note += f"; cosine with the image {codes:.3f} from the codes, {continuous:.3f} without quantization"
        rows = [[piece, " ".join(map(str, ids))] for piece, ids in zip(pieces, coded.ids.tolist(), strict=True)]
        return [rows, coded.to_json(), note, show_nearest(coded)]

    def show_classes(classes: str, template: str, data: bytes | None) -> list[Any]:
        if data is None or not classes.strip():
            return [None, None]
        image, _ = ask(answers.of_image, data)
        return list(ask(answers.classify, image, classes, template))

    def show_nearest(coded: Coded) -> list[Any]:
        hits = ask(answers.nearest, coded, _NEAREST)
        if answers.source is None:
            return [[f"{hit.score:.3f} {printable(hit.name, one_line=True)}"] for hit in hits]
        blank = Image.new("RGB", (32, 32), "#888888")  # of an image that cannot be read
        # There is room for a few words: those of the caption, where there is one.
        texts = [printable(hit.name.partition(": ")[2] or hit.name, one_line=True) for hit in hits]
        images = [blank if hit.picture is None else _picture(hit.picture) for hit in hits]
        return [(p, f"{hit.score:.2f} {text}") for p, hit, text in zip(images, hits, texts, strict=True)]

    def gallery(label: str) -> Any:
        gr.Markdown(label)  # Gradio's own label covers the first row
        return gr.Gallery(label=label, show_label=False, height="auto", buttons=["fullscreen"], elem_classes="tiles")

    def nearest_box(label: str) -> Any:
        if answers.source is not None:
            return gallery(label)
        return gr.Dataframe(label=label, headers=["cosine, name"], visible=answers.search is not None)

    has_image, has_text = answers.image is not None, answers.text is not None
    with gr.Blocks(title=f"vqclip demo: {folder}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown("### vqclip demo")
        with gr.Column(visible=has_image):
            image = gr.File(label="Image: JPEG, PNG, WebP, ...", type="binary", file_types=["image"])
            maps = gallery("What the model sees, and its codes: a panel a codebook, a colour a code")
            image_cost, image_ids = gr.Textbox(label="Size"), gr.Textbox(label="Ids of the image", max_lines=6)
            of_image = nearest_box("Nearest to the image")
        with gr.Column(visible=has_text):
            caption = gr.Textbox(label="Caption", placeholder="a red apple", submit_btn="Encode")
            tokens = gr.Dataframe(label="Ids of each token", headers=["token", "ids"])
            caption_cost, caption_ids = gr.Textbox(label="Size"), gr.Textbox(label="Ids of the caption", max_lines=6)
            of_caption = nearest_box("Nearest to the caption")
        with gr.Column(visible=has_image and has_text):
            template = gr.Textbox(DEFAULT_TEMPLATE, label="Prompt, {c} is the class")
            classes = gr.Textbox(label="Classes", placeholder="cat, dog, or one a line", lines=3, submit_btn="Classify")
            with gr.Row():
                continuous = gr.Label(label="Without quantization", num_top_classes=_CLASSES)
                codes = gr.Label(label="From the codes", num_top_classes=_CLASSES)
        options: dict[str, Any] = {"trigger_mode": "always_last", "concurrency_id": "model", "concurrency_limit": 1}
        gr.on([image.change], show_image, [image], [maps, image_ids, image_cost, of_image], api_name="image", **options)
        shown = [tokens, caption_ids, caption_cost, of_caption]
        events = [caption.submit, image.change]
        gr.on(events, show_caption, [caption, image], shown, api_name="caption", **options)
        events = [classes.submit, template.submit, image.change]
        gr.on(events, show_classes, [classes, template, image], [continuous, codes], api_name="classes", **options)
    return page.queue(max_size=64)


def _picture(pixels: Tensor) -> Image.Image:
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((256, 256))
    return picture


async def _refuse_url(url: str) -> Any:
    raise ValueError("got a URL; expected an uploaded file")


def serve(folder: str, answers: Answers, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, which raises KeyboardInterrupt.

    Args:
        folder: name of the model's folder.
        answers: its tokenizers, and an index.
        host: address to listen on.
        port: of the page; 0 for any that is free.
        ready: called with the address once it is served.

    Raises:
        ConfigError: Gradio is not installed, or the port is in use.
    """
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]  # they could share the page, open other folders, or send usage statistics
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the uploads are removed
    local = {"NO_PROXY": "127.0.0.1,localhost", "GRADIO_ANALYTICS_ENABLED": "False"}
    with tempfile.TemporaryDirectory(prefix="vqclip-demo-") as uploads:
        os.environ |= local | {"GRADIO_TEMP_DIR": uploads}
        gr = import_extra("gradio", "demo", "vqclip demo ")
        gr.processing_utils.async_ssrf_protected_get = _refuse_url  # with it Gradio fetches URLs that requests name
        theme = gr.themes.Base(font="system-ui", font_mono="ui-monospace")  # fonts of the visitor: none is fetched
        page = build_page(folder, answers)
        try:
            _, address, _ = page.launch(
                server_name=host, server_port=port or None, theme=theme, css=_CSS, share=False, quiet=True,
                prevent_thread_lock=True, max_file_size="20mb", ssr_mode=False, mcp_server=False, footer_links=[],
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"--host, --port: cannot listen on {host}:{port}: {error}; --port 0: any free") from None
        try:
            ready(address)
            threading.Event().wait()
        finally:
            page.close()
