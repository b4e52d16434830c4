"""Ways to store an image, and what comes back: the codes, fewer of them, none, means, and files of equal bytes.

What comes back is compared with the original pixel by pixel, and in the features of frozen networks (`Distances`).

Shapes: B samples of a batch, N tokens, C codebooks, Cd codebooks of detail, S side of the images.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from vqclip.data import EvalBatch
from vqclip.errors import name_section
from vqclip.evaluation.encode import MODES, Mode, load_ids, save_ids
from vqclip.evaluation.partition import RankPartition
from vqclip.evaluation.reconstructions import DecodedPrefix, decoded_prefixes
from vqclip.pixels.codecs import Codec, best_within, compress
from vqclip.pixels.frechet import FrechetConfig, FrechetFeatures, Moments, frechet_distance
from vqclip.pixels.metrics import compare_images, to_uint8
from vqclip.pixels.terms import LPIPSConfig, PerceptualConfig, PixelTerm
from vqclip.process import progress
from vqclip.tokenizer import ImageTokenizer

CODES, BYPASSED, QUANTIZED = "codes", "quantizer bypassed", "quantized"
TITLES: dict[Codec, str] = {"webp": "WebP", "jpeg": "JPEG"}
COLOUR_BITS = 24
"""Size of a colour."""

Decoded = Iterator[tuple[str, Tensor, Sequence[int] | None]]
"""Name of the method, images ``(B, 3, S, S)`` uint8 and the bytes of each file; None without files."""


DistanceConfig = Annotated[LPIPSConfig | PerceptualConfig | FrechetConfig, Field(discriminator="kind")]
"""A distance of each image, or a Fréchet distance of all images, chosen by ``kind``."""


def _check(configs: tuple[DistanceConfig, ...]) -> tuple[DistanceConfig, ...]:
    terms = [config for config in configs if not isinstance(config, FrechetConfig)]
    for config, key in itertools.product(terms, ("weight", "start_step")):
        if (got := getattr(config, key)) != (default := type(config).model_fields[key].default):
            raise ValueError(
                f"distances: got {key} {got} of kind {config.kind}, which has no effect here; expected {default}"
            )
    kinds = [config.kind for config in terms]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"got kinds {', '.join(kinds)}; expected each of lpips and perceptual at most once")
    return configs


DistanceConfigs = Annotated[tuple[DistanceConfig, ...], AfterValidator(_check)]
"""Several distances."""


class Distances:
    """Distances of a set, batch after batch.

    Args:
        configs: the distances.
        image_size: height and width of the images.
        device: device of the networks.

    Raises:
        ConfigError: a network cannot be loaded.
    """

    def __init__(self, configs: Sequence[DistanceConfig], image_size: int, device: torch.device):
        self._device = device
        self._terms: dict[str, PixelTerm] = {}
        self._features: list[FrechetFeatures] = []
        for number, config in enumerate(configs):
            with name_section(f"distances[{number}]"):
                if isinstance(config, FrechetConfig):
                    self._features.append(config.build())
                    self._features[-1].network.to(device)
                else:
                    self._terms[config.kind] = config.build(image_size).to(device)
        self.notes: list[str] = []
        """Remarks for the reader, after `finish`."""
        self._moments: dict[int, list[Moments]] = {}  # of made and of real images

    def of_images(self, made: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Return kind → ``(B,)`` float64 on the CPU, of images ``(B, 3, S, S)`` uint8."""
        if not self._terms:
            return {}
        x, y = (images.to(self._device).float() / 255 for images in (made, real))
        with torch.autocast(self._device.type, enabled=False):
            return {kind: term(x, y).double().cpu() for kind, term in self._terms.items()}

    def add(self, made: Tensor, real: Tensor) -> None:
        """Add the features of a batch ``(B, 3, S, S)`` uint8 to the moments."""
        with torch.autocast(self._device.type, enabled=False):
            for number, each in enumerate(self._features):
                new = [Moments.of(each.features(images.to(self._device))) for images in (made, real)]
                before = self._moments.get(number)
                self._moments[number] = new if before is None else [*map(Moments.add, before, new)]

    def finish(self, partition: RankPartition) -> dict[str, float]:
        """Return name → Fréchet distance of all images of all ranks; of fewer than two images, none. A collective."""
        found, one = {}, torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device=self._device)
        for number, each in enumerate(self._features):
            pair = self._moments.get(number) or [Moments.of(each.features(one)[:0])] * 2  # a rank without images
            made, real = (Moments(*(partition.gather(part[None]).sum(dim=0) for part in mine)) for mine in pair)
            if made.images >= 2:
                found[each.name] = frechet_distance(made, real)
            else:
                self.notes.append(f"no {each.name}: it needs two images")
        return found


class Methods:
    """Stores and decodes this rank's images, batch after batch, in every way.

    Args:
        tokenizer: has a pixel decoder; in evaluation mode.
        ids: ``(m, N, C)``, the stored ids of this rank's images; None without codes.
        detail_file: file that stores the detail ids of a batch.
        inputs: batches of the same images as the tower takes them; None if the decoder's size is the tower's.
        mean: ``(3, S, S)`` uint8, mean of all images.
        prefixes: whether to decode prefixes of the ids too.
        codecs: codecs to compare with.
        distances: distances in the features of networks.
    """

    def __init__(
        self,
        tokenizer: ImageTokenizer,
        ids: Tensor | None,
        detail_file: Path,
        inputs: Iterator[EvalBatch] | None,
        mean: Tensor,
        prefixes: bool,
        codecs: Sequence[Codec],
        distances: Distances,
    ):
        self._tokenizer, self._ids, self._detail_file = tokenizer, ids, detail_file
        self._inputs, self._mean, self._codecs, self._distances = inputs, mean, codecs, distances
        found = decoded_prefixes(tokenizer) if ids is not None else []
        self._decoded = {_title(each, found[-1]): each for each in (found if prefixes else found[-1:])}
        self.budget = int(found[-1].bits // 8) if found else 0
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
        """Return the bits of an image with a method that makes no files; None where nothing is stored."""
        fixed = {"mean image": 0.0, "mean colour": float(COLOUR_BITS)}
        return self._decoded[method].bits if method in self._decoded else fixed.get(method)

    def measure(self, batch: EvalBatch) -> list[list[float]]:
        """Return the values of each image of the next batch, in the order of `columns`."""
        inputs = batch if self._inputs is None else next(self._inputs)
        if not len(batch):
            return []
        columns: list[tuple[str, str]] = []
        values: list[Tensor] = []
        for method, images, sizes in self._decode(batch.images, inputs.images):
            found = compare_images(images, batch.images) | self._distances.of_images(images, batch.images)
            if sizes is not None:
                found["bytes"] = torch.tensor(sizes, dtype=torch.float64)
            columns += [(method, metric) for metric in found]
            values += found.values()
        self.columns = columns
        self._distances.add(self.reconstructions, batch.images)
        return torch.stack(values, dim=1).tolist()

    def _decode(self, real: Tensor, inputs: Tensor) -> Decoded:
        if self._ids is not None:
            ids = self._read_ids(len(real), inputs)
            for method, prefix in reversed(self._decoded.items()):
                images = prefix.decode(self._tokenizer, ids)
                yield method, self._keep(images) if method == CODES else images, None
        yield from self._through_the_tower(inputs)
        yield "mean image", self._mean.expand_as(real), None
        yield "mean colour", to_uint8(real.double().mean(dim=(2, 3), keepdim=True) / 255).expand_as(real), None
        for codec in self._codecs:
            yield from self._compress(real, codec)

    def _read_ids(self, count: int, inputs: Tensor) -> Tensor:
        """Return the stored ids ``(B, N, C + Cd)`` of the next images; detail ids are stored here."""
        assert self._ids is not None
        ids, tokenizer = self._ids[self._done : self._done + count].long(), self._tokenizer
        self._done += count
        if (detail := tokenizer.require_pixels().detail) is None:
            return ids
        sizes = detail.codebook_sizes
        save_ids(self._detail_file, tokenizer.encode_detail(inputs), sizes)
        return torch.cat((ids, load_ids(self._detail_file, sizes).long()), dim=-1)

    def _through_the_tower(self, inputs: Tensor) -> Decoded:
        tokenizer, decoder = self._tokenizer, self._tokenizer.require_pixels()
        inputs, detail = inputs.to(tokenizer.device), decoder.detail
        x, mask = tokenizer.features(inputs)
        further = None if detail is None else detail.quantizer.continuous(detail.branch(inputs))
        continuous = to_uint8(tokenizer.pixels_of(tokenizer.quantizer.continuous(x, mask), further))
        yield BYPASSED, continuous if self._ids is not None else self._keep(continuous), None
        if self._ids is not None:
            further = None if detail is None else detail(inputs).vectors
            stages, quantizer = decoder.stages, tokenizer.quantizer
            vectors = quantizer(x, mask).vectors if stages is None else quantizer.first_stages(x, stages, mask)
            yield QUANTIZED, to_uint8(tokenizer.pixels_of(vectors, further)), None

    def _compress(self, real: Tensor, codec: Codec) -> Decoded:
        sizes = []
        for image in real.cpu():
            progress.heartbeat()  # a large image takes about a second
            sizes.append(compress(image, codec, self.budget))
        best = [best_within(found, image, self.budget) for found, image in zip(sizes, real.cpu(), strict=True)]
        for method, files in ((TITLES[codec], [each[0] for each in sizes]), (f"{TITLES[codec]}, reduced size", best)):
            yield method, torch.stack([file.pixels for file in files]), [file.bytes for file in files]

    def _keep(self, images: Tensor) -> Tensor:
        self.reconstructions = to_uint8(images)
        return self.reconstructions


def _title(prefix: DecodedPrefix, whole: DecodedPrefix) -> str:
    """Return the name of the method that stores a prefix of the ids; the ids of `whole` are all of them."""
    if prefix == whole:
        return CODES
    if prefix.detail is not None and prefix.prefix == whole.prefix:
        return f"{CODES}, {prefix.detail} of {whole.detail} detail stages"
    return f"{CODES}, {prefix.label}" + (", no detail" if whole.detail else "")
