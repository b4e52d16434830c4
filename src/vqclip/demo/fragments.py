"""The parts of the page as HTML. Everything that comes from a visitor, a file or an index is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vqclip.demo.answers import Answers, CaptionAnswer, ClassScore, ImageAnswer
from vqclip.report.images import code_map, find_grid, thumbnail_uri
from vqclip.report.page import environment
from vqclip.search.hits import Hit

_MOST_CELLS = 8192
"""Largest number of cells in code maps; codebooks beyond it are not drawn."""
_MOST_COLUMNS = 32
"""Largest number of codebooks in a row of a token's codes."""
_MOST_CLASSES = 20
"""Largest number of classes in the table."""


def render(name: str, **values: Any) -> str:
    """Return the fragment ``name``, a macro of ``fragments.html``."""
    return str(getattr(environment("vqclip.demo", "").get_template("fragments.html").module, name)(**values))


def draw_notice(text: str) -> str:
    """Return the reason why there is no answer."""
    return render("notice", text=text)


def draw_hint(text: str) -> str:
    """Return advice on what to do."""
    return render("hint", text=text)


def draw_model(folder: str, answers: Answers) -> str:
    """Return the head of the page: the tokenizers, and their bits."""
    parts = [each for each in (answers.image, answers.text) if each is not None]
    return render("model", folder=folder, tokenizers=parts, search=answers.search)


def draw_image(answer: ImageAnswer) -> str:
    """Return an image's cost and its code maps, a panel a codebook."""
    tokens, codebooks = answer.coded.ids.shape
    columns = (answer.grid or find_grid(tokens))[1]
    count = min(codebooks, max(1, _MOST_CELLS // tokens))
    maps = [
        (name, code_map(answer.coded.ids[:, codebook].tolist(), columns))
        for codebook, name in enumerate(answer.codebooks[:count])
    ]
    return render("image", answer=answer, seen=thumbnail_uri(answer.pixels), maps=maps, codebooks=codebooks)


def draw_caption(answer: CaptionAnswer) -> str:
    """Return a caption's cost, and the codes of each of its tokens."""
    codebooks = answer.coded.ids.shape[1]
    strips = [code_map(row, min(codebooks, _MOST_COLUMNS)) for row in answer.coded.ids.tolist()]
    numbers = tuple(str(number) for number in range(1, len(strips) + 1))
    pieces = [piece or "…" for piece in answer.pieces or numbers]  # empty: a part of a character
    return render(
        "caption", answer=answer, tokens=list(zip(pieces, strips, strict=True)), rows=-(-codebooks // _MOST_COLUMNS)
    )


def draw_cosine(continuous: float, codes_only: float) -> str:
    """Return the similarity of the image and the caption."""
    return render("cosine", continuous=continuous, codes_only=codes_only)


def draw_classes(scores: Sequence[ClassScore], scale: float) -> str:
    """Return the probabilities of classes."""
    return render("classes", scores=scores[:_MOST_CLASSES], count=len(scores), scale=scale)


def draw_hits(title: str, hits: Sequence[Hit]) -> str:
    """Return items of the index, best first."""
    items = []
    for hit in hits:
        place, separator, caption = hit.name.partition(": ")  # as `vqclip search build` names items
        name = (caption, place) if separator else (place, "")
        items.append((hit, None if hit.picture is None else thumbnail_uri(hit.picture), *name))
    return render("hits", title=title, items=items)


def draw_commands(commands: str) -> str:
    """Return the commands that make an index."""
    return render("commands", commands=commands)
