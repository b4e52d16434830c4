"""Ways to store an image, and what comes back: the codes, fewer of them, none, means, and files of equal bytes.

Shapes: B samples of a batch, N tokens, C codebooks, S side of the images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vqclip.data import EvalBatch
from vqclip.evaluation.bits import prefix_bits, prefix_label
from vqclip.evaluation.encode import MODES, Mode
from vqclip.pixels.metrics import compare_images, to_uint8
from vqclip.pixels.metrics.codecs import Codec, best_within, compress
from vqclip.quantizers import Prefix
from vqclip.tokenizer import ImageTokenizer

CODES, BYPASSED, QUANTIZED = "codes", "quantizer bypassed", "quantized"
TITLES: dict[Codec, str] = {"webp": "WebP", "jpeg": "JPEG"}
COLOUR_BITS = 24
"""Size of a colour."""

Decoded = Iterator[tuple[str, Tensor, Sequence[int] | None]]
"""Name of the method, images ``(B, 3, S, S)`` uint8 and the bytes of each file; None without files."""


class Methods:
    """Stores and decodes this rank's images, batch after batch, in every way.

    Args:
        tokenizer: has a pixel decoder; in evaluation mode.
        ids: ``(m, N, C)``, the stored ids of this rank's images; None without codes.
        inputs: batches of the same images as the tower takes them; None if the decoder's size is the tower's.
        mean: ``(3, S, S)`` uint8, mean of all images.
        prefixes: whether to decode prefixes of the ids too.
        codecs: codecs to compare with.
    """

    def __init__(
        self,
        tokenizer: ImageTokenizer,
        ids: Tensor | None,
        inputs: Iterator[EvalBatch] | None,
        mean: Tensor,
        prefixes: bool,
        codecs: Sequence[Codec],
    ):
        self._tokenizer, self._ids, self._inputs, self._mean, self._codecs = tokenizer, ids, inputs, mean, codecs
        extent = tokenizer.quantizer.extent
        shorter = {prefix_label(each, extent): each for each in extent.shorter() if prefixes and each != extent}
        self.prefixes: dict[str, Prefix] = {f"{CODES}, {label}": each for label, each in shorter.items()}
        """Name of the method → prefix of the ids."""
        self.budget = int(tokenizer.bits_per_sample // 8)
        """Bytes of the codes of an image, rounded down."""
        self.columns: list[tuple[str, str]] = []
        """Method and metric of each value that `measure` returns; empty before the first image."""
        self.reconstructions = torch.empty(0)
        """``(B, 3, S, S)`` uint8, those of the last batch; of the codes, where there are any."""
        self._done = 0

    @property
    def modes(self) -> dict[Mode, str]:
        """Mode → name of its method."""
        methods = (BYPASSED, QUANTIZED, CODES)
        return dict(zip(MODES, methods, strict=False)) if self._ids is not None else {m: BYPASSED for m in MODES[:2]}

    def bits(self, method: str) -> float | None:
        """Return the bits of an image with a method that makes no files; None without codes."""
        fixed = {"mean image": 0.0, "mean colour": float(COLOUR_BITS), CODES: self._tokenizer.bits_per_sample}
        if method in self.prefixes:
            return prefix_bits(self._tokenizer, self.prefixes[method])
        return fixed.get(method)

    def measure(self, batch: EvalBatch) -> list[list[float]]:
        """Return the values of each image of the next batch, in the order of `columns`."""
        inputs = batch if self._inputs is None else next(self._inputs)
        if not len(batch):
            return []
        columns: list[tuple[str, str]] = []
        values: list[Tensor] = []
        for method, images, sizes in self._decode(batch.images, inputs.images):
            found = compare_images(images, batch.images)
            if sizes is not None:
                found["bytes"] = torch.tensor(sizes, dtype=torch.float64)
            columns += [(method, metric) for metric in found]
            values += found.values()
        self.columns = columns
        return torch.stack(values, dim=1).tolist()

    def _decode(self, real: Tensor, inputs: Tensor) -> Decoded:
        if self._ids is not None:
            ids = self._ids[self._done : self._done + len(real)].to(self._tokenizer.device, torch.int64)
            self._done += len(real)
            yield CODES, self._keep(self._tokenizer.decode_pixels(ids)), None
            for method, prefix in self.prefixes.items():
                yield method, to_uint8(self._tokenizer.decode_pixels(self._tokenizer.truncate(ids, *prefix))), None
        yield from self._through_the_tower(inputs)
        yield "mean image", self._mean.expand_as(real), None
        yield "mean colour", to_uint8(real.double().mean(dim=(2, 3), keepdim=True) / 255).expand_as(real), None
        for codec in self._codecs:
            yield from self._compress(real, codec)

    def _through_the_tower(self, inputs: Tensor) -> Decoded:
        tokenizer = self._tokenizer
        x, mask = tokenizer.features(inputs.to(tokenizer.device))
        continuous = to_uint8(tokenizer.pixels_of(tokenizer.quantizer.continuous(x, mask)))
        yield BYPASSED, continuous if self._ids is not None else self._keep(continuous), None
        if self._ids is not None:
            yield QUANTIZED, to_uint8(tokenizer.pixels_of(tokenizer.quantizer(x, mask).vectors)), None

    def _compress(self, real: Tensor, codec: Codec) -> Decoded:
        sizes = [compress(image, codec, self.budget) for image in real.cpu()]
        best = [best_within(found, image, self.budget) for found, image in zip(sizes, real.cpu(), strict=True)]
        for method, files in ((TITLES[codec], [each[0] for each in sizes]), (f"{TITLES[codec]}, reduced size", best)):
            yield method, torch.stack([file.pixels for file in files]), [file.bytes for file in files]

    def _keep(self, images: Tensor) -> Tensor:
        self.reconstructions = to_uint8(images)
        return self.reconstructions
