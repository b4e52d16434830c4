"""Checks of a tokenizer's inputs, with errors that say how to convert a wrong input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vqclip.errors import ShapeError


def require_images(images: Any) -> list[Any]:
    """Return one PIL image, or a list or tuple of them, as a list; raise ShapeError for any other input."""
    if not isinstance(images, (list, tuple)):
        require_image(images, "images")
        return [images]
    for number, image in enumerate(images):
        require_image(image, f"images[{number}]")
    return list(images)


def require_image(image: Any, name: str = "image") -> None:
    """Check that ``image`` is a PIL image; raise ShapeError, with its ``name``, for any other input."""
    from PIL.Image import Image

    if isinstance(image, Image):
        return
    if isinstance(image, Tensor):
        remedy = "torch.stack makes one tensor of several, which encode takes in place of a list"
    elif _is_array(image):
        remedy = "PIL.Image.fromarray(image) makes one of (H, W, 3) uint8, torch.from_numpy a tensor for encode"
    elif isinstance(image, (str, bytes)) or hasattr(image, "__fspath__"):
        remedy = "PIL.Image.open reads a file"
    else:
        remedy = "or, for encode, a list of PIL images or a (B, 3, H, W) tensor"
    raise ShapeError(f"{name}: got {_got(image)}, expected a PIL image; {remedy}")


def require_captions(captions: Any) -> list[str]:
    """Return a list or tuple of str as a list; raise ShapeError for any other input."""
    if isinstance(captions, (str, bytes)) or not isinstance(captions, Sequence):
        one = " with one caption: [caption]" if isinstance(captions, str) else ""
        raise ShapeError(f"captions: got {_got(captions)}, expected a list of str{one}")
    for number, caption in enumerate(captions):
        if not isinstance(caption, str):
            remedy = "; bytes become one by .decode()" if isinstance(caption, bytes) else ""
            raise ShapeError(f"captions[{number}]: got {_got(caption)}, expected a str{remedy}")
    return list(captions)


def require_ids(ids: Any, name: str = "ids", shape: str = "(B, N, C)") -> Tensor:
    """Return ids of any integer dtype as int64, because torch cannot compare uint16, uint32 and uint64.

    Messages contain their ``name`` and the expected ``shape``.

    Raises:
        ShapeError: no tensor; booleans, floating-point or complex numbers; or uint64 numbers that do not fit int64.
    """
    if not isinstance(ids, Tensor):
        make = "torch.from_numpy(ids)" if _is_array(ids) else "torch.tensor(ids)"
        remedy = f"; {make} makes one" if _is_array(ids) or isinstance(ids, (list, tuple)) else ""
        raise ShapeError(f"{name}: got {_got(ids)}, expected an int64 tensor {shape}{remedy}")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ShapeError(f"{name}: got shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers {shape}")
    wide = ids.long()
    if ids.dtype == torch.uint64 and bool((wide < 0).any()):  # wrapped around, possibly to -1
        raise ShapeError(f"{name}: got a uint64 number of 2^63 or more, expected ids that fit int64")
    return wide


def require_codes(ids: Any, sizes: Sequence[int], name: str = "ids", samples: bool = False) -> Tensor:
    """Return ids ``(..., C)`` of codebooks of these sizes, or -1 for absent ones, as int64.

    Args:
        ids: of any integer type.
        sizes: K of each codebook.
        name: of the ids in messages.
        samples: expect ``(B, N, C)``.

    Raises:
        ShapeError: see `require_ids`; another number of columns, or an id outside its codebook (which is not checked
            under `torch.compile`).
    """
    shape = f"({'B, N' if samples else '...'}, {len(sizes)})"
    wide = require_ids(ids, name, shape)
    if wide.ndim == 0 or wide.shape[-1] != len(sizes) or (samples and wide.ndim != 3):
        raise ShapeError(f"{name}: got shape {tuple(wide.shape)}, expected {shape}: one id per codebook")
    if torch.compiler.is_compiling():  # a graph cannot depend on values
        return wide
    largest = torch.tensor([size - 1 for size in sizes], device=wide.device)
    require_all((wide >= -1) & (wide <= largest), wide, name, [f"0 to {size - 1}, or -1 for none" for size in sizes])
    return wide


def require_all(good: Tensor, ids: Tensor, name: str, expected: Sequence[str]) -> None:
    """Raise ShapeError for the first id that is not ``good``; ``expected`` describes good ids of each codebook."""
    if not bool(good.all()):
        place = [int(index) for index in (~good).nonzero()[0]]
        got = int(ids[tuple(place)])
        raise ShapeError(f"{name}{place}: got id {got}, expected codebook {place[-1]}: {expected[place[-1]]}")


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__")


def _got(value: Any) -> str:
    kind = type(value).__name__
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {kind} of shape {tuple(value.shape)} and dtype {value.dtype}"
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({kind})"
