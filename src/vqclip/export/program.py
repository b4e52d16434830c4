"""A part of a tokenizer as a graph of torch operators, by `torch.export`.

Shapes: B samples, N tokens, C codebooks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vqclip.errors import ConfigError
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

__all__ = ["PARTS", "AnyTokenizer", "Part", "example_inputs", "export_program", "parts_of"]

AnyTokenizer = ImageTokenizer | TextTokenizer
Part = Literal["encode", "decode", "embed", "decode_pixels"]
"""Exported methods of a tokenizer.

- encode: outputs of `preprocess` → ids.
- decode: ids → vectors.
- embed: ids → joint embedding.
- decode_pixels: ids, with detail ids if there are any (-1 for left-out ones) → images; only of a tokenizer with a pixel
  decoder.
"""
PARTS: tuple[Part, ...] = ("encode", "decode", "embed")
"""Parts of every tokenizer, in the order of export."""

_EXAMPLES = 3
"""Batch size of example inputs; not 1, which a graph could take for a constant."""
_MOST = 2**20
"""Largest batch size."""


class _Method(nn.Module):
    """One method of a tokenizer as a module, for `torch.export`."""

    def __init__(self, tokenizer: AnyTokenizer, name: str):
        super().__init__()
        self.tokenizer, self.name = tokenizer, name

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the method."""
        method = getattr(self.tokenizer, self.name)
        return method(inputs)


def parts_of(tokenizer: AnyTokenizer) -> tuple[Part, ...]:
    """Return the parts of a tokenizer, in the order of export."""
    return PARTS if tokenizer.pixels is None else (*PARTS, "decode_pixels")


def export_program(tokenizer: AnyTokenizer, part: Part) -> ExportedProgram:
    """Export a part of a tokenizer as a program for any batch size from 1; `torch.export.save` writes it to a file.

    The graph has the tokenizer's weights, in their dtype, on their device. It takes the inputs of the method of that
    name, with these restrictions:

    - pixels ``(B, 3, H, W)`` must be uint8;
    - token numbers ``(B, N)`` and ids ``(B, N, C)`` int64 must have all N positions, with padding.

    Values are not checked: a number outside the vocabulary or an id outside its codebook gives no clear error.

    Args:
        tokenizer: the tokenizer; in evaluation mode during the export.
        part: the part.

    Raises:
        ConfigError: an unknown part, or a tokenizer without codes.
    """
    if part not in (parts := parts_of(tokenizer)):
        raise ConfigError(f"part: got {part!r}, expected one of {', '.join(parts)}, the parts of this tokenizer")
    if not tokenizer.codebook_sizes:
        raise ConfigError(
            f"export: the {tokenizer.modality} tokenizer's quantizer is {type(tokenizer.quantizer).__name__}, which "
            "has no codes to encode to; expected a tokenizer trained with fsq, lfq, bsq, vq, simvq, residual or product"
        )
    training = tokenizer.training
    tokenizer.eval()
    try:
        with torch.no_grad():
            batch = Dim("batch", min=1, max=_MOST)
            inputs = example_inputs(tokenizer, part)
            return torch.export.export(_Method(tokenizer, part), (inputs,), dynamic_shapes=({0: batch},), strict=False)
    finally:
        tokenizer.train(training)


def example_inputs(tokenizer: AnyTokenizer, part: Part, count: int = _EXAMPLES) -> Tensor:
    """Return inputs of a part: black pixels ``(count, 3, H, W)`` uint8, empty captions ``(count, N)`` or id 0."""
    device = tokenizer.device
    if part != "encode":
        codebooks = len(tokenizer.codebook_sizes)
        if part == "decode_pixels" and tokenizer.pixels is not None and tokenizer.pixels.detail is not None:
            codebooks += len(tokenizer.pixels.detail.codebook_sizes)
        return torch.zeros(count, tokenizer.num_tokens, codebooks, dtype=torch.int64, device=device)
    if isinstance(tokenizer, ImageTokenizer):
        size = tokenizer.tower.image_size
        return torch.zeros(count, 3, size, size, dtype=torch.uint8, device=device)
    return tokenizer.preprocess([""] * count).to(device)
