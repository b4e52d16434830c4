"""A part of a tokenizer as a graph of torch operators, by `torch.export`.

Shapes: B samples, N tokens, C codebooks (DESIGN section 2).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vqclip.errors import ConfigError
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

__all__ = ["PARTS", "AnyTokenizer", "Part", "example_inputs", "export_program"]

AnyTokenizer = ImageTokenizer | TextTokenizer
Part = Literal["encode", "decode", "embed"]
"""Exported methods of a tokenizer.

- encode: what `preprocess` makes → ids.
- decode: ids → vectors.
- embed: ids → joint embedding.
"""
PARTS: tuple[Part, ...] = get_args(Part)
"""Every part, in the order in which they are exported."""

_EXAMPLES = 3
"""Not 1, which a graph could take for a constant."""
_MOST = 2**20
"""The largest batch."""


class _Method(nn.Module):
    """One method of a tokenizer as a module's forward, which is what `torch.export` takes."""

    def __init__(self, tokenizer: AnyTokenizer, name: str):
        super().__init__()
        self.tokenizer, self.name = tokenizer, name

    def forward(self, inputs: Tensor) -> Tensor:
        """The method of that name."""
        method = getattr(self.tokenizer, self.name)
        return method(inputs)


def export_program(tokenizer: AnyTokenizer, part: Part) -> ExportedProgram:
    """A part of a tokenizer as a program for any batch size from 1; `torch.export.save` writes it to a file.

    The graph has the tokenizer's weights, in their type, on their device. Its inputs are those of the method of that
    name, with one restriction for each kind:

    - pixels ``(B, 3, H, W)`` must be uint8;
    - token numbers ``(B, N)`` and ids ``(B, N, C)`` int64 must have all N positions, padding included.

    Values are not looked at: a number outside the vocabulary or an id outside its codebook gives no clear error.

    Args:
        tokenizer: is put into evaluation mode for the time of the export.
        part: which part.

    Raises:
        ConfigError: there is no such part, or the tokenizer has no codes.
    """
    if part not in PARTS:
        raise ConfigError(f"part: got {part!r}, expected one of {', '.join(PARTS)}")
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
    """What a part takes: black pixels ``(count, 3, H, W)`` uint8, empty captions ``(count, N)`` or the first codes."""
    device = tokenizer.device
    if part in ("decode", "embed"):
        shape = (count, tokenizer.num_tokens, len(tokenizer.codebook_sizes))
        return torch.zeros(shape, dtype=torch.int64, device=device)
    if isinstance(tokenizer, ImageTokenizer):
        size = tokenizer.tower.image_size
        return torch.zeros(count, 3, size, size, dtype=torch.uint8, device=device)
    return tokenizer.preprocess([""] * count).to(device)
