"""Answer a request: everything that the page shows, from everything that a visitor has given. Refusals are words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from vqclip.data import mask_credentials
from vqclip.demo import fragments
from vqclip.demo.answers import MAX_FILE_BYTES, Answers, CaptionAnswer, Coded, ImageAnswer, cosine, split_classes
from vqclip.demo.loading import index_commands
from vqclip.errors import DataError, VqclipError
from vqclip.io.files import read_bounded

__all__ = ["Request", "Response", "respond"]

_NEAREST = 8
"""Items of the index that are shown."""
T = TypeVar("T")


class Request(NamedTuple):
    """Everything that a visitor has given."""

    image: Path | None = None
    """Uploaded file."""
    caption: str = ""
    classes: str = ""
    """Names between commas, or one a line."""
    template: str = "{c}"
    """Prompt with ``{c}`` for the name of a class."""


class Response(NamedTuple):
    """Everything that the page shows: HTML, and ids as JSON."""

    image: str
    image_ids: str
    caption: str
    caption_ids: str
    classes: str
    nearest: str


def respond(answers: Answers, folder: str, request: Request) -> Response:
    """Answer a request. An input that cannot be used is refused in the place of its answer.

    Args:
        answers: model and index.
        folder: name of the model's folder, for the commands that make an index.
        request: inputs.
    """
    image, shown_image = _show_image(answers, request.image)
    caption, shown_caption = _show_caption(answers, request.caption)
    image_code, caption_code = (each and each.coded for each in (image, caption))
    if image_code and caption_code:
        shown_caption += fragments.draw_cosine(*cosine(image_code, caption_code))
    return Response(
        shown_image,
        image_code.to_json() if image_code else "",
        shown_caption,
        caption_code.to_json() if caption_code else "",
        _classes(answers, image_code, request),
        _nearest(answers, folder, {"image": image_code, "caption": caption_code}),
    )


def _show_image(answers: Answers, path: Path | None) -> tuple[ImageAnswer | None, str]:
    if path is None:
        return None, fragments.draw_hint("Its ids appear here as code maps: one panel a codebook, one colour a code.")
    advice = "Drop another image, such as a JPEG, PNG or WebP file."
    return _attempt(lambda: answers.read_image(_read_upload(path)), fragments.draw_image, advice)


def _show_caption(answers: Answers, caption: str) -> tuple[CaptionAnswer | None, str]:
    if not caption:
        return None, fragments.draw_hint("Its ids appear here, token by token.")
    return _attempt(lambda: answers.read_caption(caption), fragments.draw_caption)


def _attempt(compute: Callable[[], T], draw: Callable[[T], str], advice: str = "") -> tuple[T | None, str]:
    try:
        found = compute()
        return found, draw(found)
    except VqclipError as error:
        return None, fragments.draw_notice(mask_credentials(str(error))) + (advice and fragments.draw_hint(advice))


def _read_upload(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except OSError:
        raise DataError("the uploaded file was removed: files are kept for an hour; drop the image again") from None


def _classes(answers: Answers, image: Coded | None, request: Request) -> str:
    if not request.classes.strip():
        return fragments.draw_hint("Probabilities of the classes that you type appear here.")

    def classify() -> str:
        names = split_classes(request.classes)
        if not names:
            raise DataError("classes: got no name; expected names between commas, or one a line")
        if image is None:
            return fragments.draw_hint(f"{len(names)} classes; drop an image to see their probabilities.")
        return fragments.draw_classes(answers.classify(image, names, request.template), answers.scale or 1.0)

    return _attempt(classify, str)[1]


def _nearest(answers: Answers, folder: str, codes: dict[str, Coded | None]) -> str:
    if answers.search is None:
        return fragments.draw_commands(index_commands(folder))
    shown = [
        _attempt(
            lambda code=code: answers.nearest(code, _NEAREST),  # type: ignore[misc]
            lambda hits, what=what: fragments.draw_hits(f"Nearest to the {what}", hits),  # type: ignore[misc]
        )[1]
        for what, code in codes.items()
        if code is not None
    ]
    return "".join(shown) or fragments.draw_hint("The nearest items of the index appear here.")
