"""The layout of the page, in Gradio."""

from __future__ import annotations

import logging
from pathlib import Path

import gradio as gr

from vqclip.data.sources.captions import DEFAULT_TEMPLATE
from vqclip.demo import fragments
from vqclip.demo.answers import MAX_FILE_BYTES, Answers
from vqclip.demo.respond import Request, Response, respond

__all__ = ["CSS", "THEME", "build_page"]

_log = logging.getLogger(__name__)
CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
THEME = gr.themes.Base(
    primary_hue="indigo",
    neutral_hue="slate",
    font=["system-ui", "sans-serif"],  # of the visitor's machine; the theme's own would be fetched
    font_mono=["ui-monospace", "monospace"],
)


def build_page(folder: str, answers: Answers, uploads: Path) -> gr.Blocks:
    """Return the page of a model and an index.

    Its only event sends every input and replaces every output, so the server keeps nothing of a visitor.

    Args:
        folder: name of the model's folder.
        answers: model and index.
        uploads: folder of uploaded files; no other file is read.
    """
    has_image, has_text = answers.image is not None, answers.text is not None
    start = respond(answers, folder, Request())
    with gr.Blocks(title=f"vqclip demo: {folder}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        _html(fragments.draw_model(folder, answers))
        with gr.Row(visible=has_image, elem_classes="vq-section"):
            with gr.Column(scale=1, min_width=280):
                image = gr.Image(
                    type="filepath",
                    sources=["upload", "clipboard"],
                    label="Image",
                    height=260,
                    buttons=["fullscreen"],
                    placeholder=f"# Drop an image\nor click to pick one\nJPEG, PNG, ..., {MAX_FILE_BYTES >> 20} MB",
                    elem_id="image",
                )
                # Gradio's own would decode the file without our limits.
                vars(image)["preprocess"] = lambda upload: None if upload is None else _path_of(upload.path, uploads)
                image_ids = _ids("Ids of the image", "image-ids")
            with gr.Column(scale=2, min_width=280):
                shown_image = _html(start.image, "image-codes")
        with gr.Row(visible=has_text, elem_classes="vq-section"):
            with gr.Column(scale=1, min_width=280):
                caption = gr.Textbox(
                    label="Caption", placeholder="a red apple", submit_btn="Encode", max_lines=4, elem_id="caption"
                )
                caption_ids = _ids("Ids of the caption", "caption-ids")
            with gr.Column(scale=2, min_width=280):
                shown_caption = _html(start.caption, "caption-codes")
        with gr.Row(visible=has_image and has_text, elem_classes="vq-section"):
            with gr.Column(scale=1, min_width=280):
                template = gr.Textbox(DEFAULT_TEMPLATE, label="Prompt, {c} is the class", elem_id="template")
                classes = gr.Textbox(
                    label="Classes",
                    placeholder="cat, dog, car\nor one a line",
                    lines=3,
                    max_lines=8,
                    submit_btn="Classify",
                    elem_id="classes",
                )
            with gr.Column(scale=2, min_width=280):
                shown_classes = _html(start.classes, "probabilities")
        with gr.Row(elem_classes="vq-section"):
            nearest = _html(start.nearest, "nearest")

        def answer(path: Path | None, *texts: str | None) -> Response:
            try:
                return respond(answers, folder, Request(path, *(str(text or "") for text in texts)))
            except Exception:  # on the page no visitor could do anything about it; the terminal has the cause
                _log.exception("a request failed")
                failed = fragments.draw_notice("This failed on the server; its terminal shows why.")
                return Response(failed, "", failed, "", failed, failed)

        gr.on(
            [image.change, caption.submit, template.submit, classes.submit],
            answer,
            [image, caption, classes, template],
            [shown_image, image_ids, shown_caption, caption_ids, shown_classes, nearest],
            show_progress="minimal",
            trigger_mode="always_last",
            api_visibility="private",
        )
    return page.queue(max_size=64)


def _path_of(upload: str, uploads: Path) -> Path:
    path = Path(upload).resolve()
    if not path.is_relative_to(uploads):
        raise ValueError("expected a file that was uploaded here")
    return path


def _html(value: str, name: str | None = None) -> gr.HTML:
    return gr.HTML(value, js_on_load=None, apply_default_css=False, elem_id=name)


def _ids(label: str, name: str) -> gr.Textbox:
    return gr.Textbox(
        label=label, lines=3, max_lines=6, buttons=["copy"], interactive=False, elem_id=name, elem_classes="vq-ids"
    )
