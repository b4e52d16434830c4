"""Reconstructions from stored ids: their quality against bits, beside WebP and JPEG, and what they still mean.

images → ids → file → ids → pixel decoder → 8-bit images → quality beside the originals
                                                 └→ ids and embeddings again → agreement, zero-shot or R@1

What comes back is compared with the original pixel by pixel, and in the features of frozen networks (`Distances`).

Shapes: B samples of a batch, N tokens, C codebooks, Cd codebooks of detail, S side of the images.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torchvision.transforms.v2.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode

from vqclip.data import EvalBatch, Source, mask_credentials
from vqclip.data.sources.class_names import DEFAULT_TEMPLATE, fill_templates
from vqclip.errors import DataError, name_section
from vqclip.evaluation.details import Details, Interval
from vqclip.evaluation.encode import MODES, Encoded, Encoder, Mode, RankPartition, load_ids, save_ids
from vqclip.evaluation.image_details import make_details
from vqclip.evaluation.images import AnyData, EncodedImages, ImagesConfig, encode_images, encode_set
from vqclip.evaluation.intervals import class_intervals, mean_value_intervals
from vqclip.evaluation.ranking import CLASS_FIGURES, DEPTHS, class_figures
from vqclip.evaluation.reconstructions import decoded_prefixes, pixel_transform
from vqclip.evaluation.results import PixelResult, PixelRow, Result, common_modes, fill_modes
from vqclip.evaluation.retrieval import both_ranks, chance, recall_intervals, recalls
from vqclip.evaluation.zero_shot import class_embeddings, rank_classes
from vqclip.model import CLIP
from vqclip.pixels.codecs import Codec, best_within, compress
from vqclip.pixels.frechet import FrechetConfig, FrechetFeatures, Moments, frechet_distance
from vqclip.pixels.metrics import MS_SSIM_SIZE, SSIM_SIZE, compare_images, mean_figures, psnr, to_uint8
from vqclip.pixels.terms import LPIPSConfig, PerceptualConfig, PixelTerm
from vqclip.process import progress
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

QUALITY = ("psnr", "psnr_of_mse", "ssim")
"""Figures of the quality of images: higher is better, and the first two are in dB."""
AGREEMENT = "id_agreement"
"""Share of the ids that encoding the reconstruction again gives back."""
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


class PixelQualityConfig(ImagesConfig):
    """Quality of the images that the pixel decoder makes of stored ids, against bits."""

    figures: ClassVar[tuple[str, ...]] = QUALITY
    codes_figures: ClassVar[tuple[str, ...]] = (AGREEMENT,)
    needs_texts: ClassVar[bool] = False

    kind: Literal["pixels"] = "pixels"
    name: str = "pixels"
    """Title of the results."""
    data: AnyData
    """The images, labelled or captioned."""
    prefixes: bool = True
    """Whether to decode the first residual stages and the first codebooks alone, too."""
    codecs: tuple[Codec, ...] = ("webp", "jpeg")
    """Codecs to compare with, at most at the bytes of the codes; each takes about 30 ms for an image of 64 pixels."""
    distances: DistanceConfigs = ()
    """Distances in the features of frozen networks, such as LPIPS of each image and the Fréchet distance of all of
    them, with weights from files."""
    meaning: bool = True
    """Whether to evaluate zero-shot accuracy or R@1 of the reconstructions, beside those of the originals; a tokenizer
    of images alone has neither, which a note mentions."""

    def require(self, model: nn.Module) -> None:
        """Raise ConfigError if a model has no pixel decoder, or a network of the distances cannot be loaded."""
        tokenizer: Any = model.image
        Distances(self.distances, tokenizer.require_pixels().image_size, tokenizer.device)

    def run(self, model: CLIP, encoder: Encoder, name: str) -> Result:
        """Store, decode and compare every image, and encode the reconstructions again.

        Raises:
            ConfigError: the model has no pixel decoder.
            DataError: the data cannot be used.
        """
        tokenizer, partition, size = model.image, encoder.partition, model.image.require_pixels().image_size
        sizes, preprocess = tokenizer.codebook_sizes, tokenizer.config.preprocess
        images = encode_set(self, self.data, model, encoder, f"{name}-image", self.limit)
        meaning = None
        if self.meaning and (text := getattr(model, "text", None)) is not None:
            meaning = Meaning(images, text, encoder, self.batch_size, f"{name}-text")
        if not images.annotations:
            raise DataError(f"{self.name}: got no image that can be used")
        distances = Distances(self.distances, size, tokenizer.device)
        stored, inputs = images.encoded.file, None
        if size != tokenizer.tower.image_size:
            inputs = iter(self.read(images.source, tokenizer.transform, partition))
        ids = None if stored is None else load_ids(stored, sizes)
        detail_file = encoder.folder / f"{name}-detail-{partition.rank}.safetensors"
        mean = self._mean_image(tokenizer, images.source, partition)
        methods = Methods(self, tokenizer, ids, detail_file, inputs, mean, distances)

        def reconstructions(batch: EvalBatch) -> Tensor:
            """Return those of the batch that `Methods.measure` has seen, at the size that the tower takes."""
            made, side = methods.reconstructions, tokenizer.tower.image_size
            mode = InterpolationMode(preprocess.interpolation)
            return made if made.shape[-1] == side else F.resize(made, [side, side], mode, antialias=True)

        made = encode_images(
            self, images.source, tokenizer, encoder, f"{name}-reconstructed", methods.measure,
            transform=pixel_transform(tokenizer), inputs=reconstructions,
        )  # fmt: skip
        columns = next(filter(None, partition.gather_items([[*map(list, methods.columns)]])))
        rows = _rows(columns, made.annotations, methods)
        by_method = {row.method: row.figures for row in rows}
        figures = {
            mode: {figure: by_method[method][figure] for figure in QUALITY if figure in by_method[method]}
            for mode, method in methods.modes.items()
        }
        if sizes:
            assert stored is not None
            assert made.encoded.file is not None
            same = (load_ids(stored, sizes) == load_ids(made.encoded.file, sizes)).flatten(1).double().mean(dim=1)
            figures["codes_only"][AGREEMENT] = float(partition.gather_rows(same.to(tokenizer.device)).cpu().mean())
        both = {"original": images, "reconstructed": made}
        intervals: dict[Mode, dict[str, Interval]] = {}
        if meaning is not None:
            with partition.raise_on_all_ranks():  # one rank may be asked to stop
                for which, each in both.items():
                    rates, between = meaning.figures(each.encoded)
                    for mode, figure in itertools.product(rates, meaning.chance):
                        figures.setdefault(mode, {})[f"{which}_{figure}"] = rates[mode][figure]
                        intervals.setdefault(mode, {})[f"{which}_{figure}"] = between[mode][figure]
        distances_of_all = distances.finish(partition)
        names = images.source.classnames
        chances = {} if meaning is None else meaning.chance
        shape = "shorter side resized, centre cropped" if preprocess.mode == "crop" else "both sides resized"
        return Result(
            name=self.name,
            kind=self.kind,
            figures=fill_modes(figures),
            chance={f"{which}_{figure}": rate for which in both for figure, rate in chances.items()},
            samples=len(images.annotations),
            classes=len(names) or None,
            captions=0 if meaning is None else meaning.texts,
            usage={"image": images.encoded.usage} | ({} if meaning is None else {"text": meaning.text.usage}),
            notes=[*images.notes, *self._notes(model, rows, methods), *distances.notes],
            details=make_details(
                tokenizer, encoder, images, names, lambda maker: Details(reconstructions=maker.reconstructions())
            ),
            intervals=intervals,
            pixels=PixelResult(
                reference=describe_data(self.data),
                image_size=size,
                preprocessing=f"{shape}, {preprocess.interpolation}, antialiased, 8 bits",
                rows=[row for row in rows if row.method != QUANTIZED],
                distances=distances_of_all,
            ),
        )

    def _mean_image(self, tokenizer: ImageTokenizer, source: Source, partition: RankPartition) -> Tensor:
        """Return the mean ``(3, S, S)`` uint8 of all images: the best image for all of them, by squared error."""
        size, transform = tokenizer.require_pixels().image_size, pixel_transform(tokenizer)
        total, count = torch.zeros(1, 3, size, size, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        with partition.raise_on_all_ranks():
            for batch in self.read(source, transform, partition):
                progress.heartbeat()
                if len(batch):
                    total += batch.images.long().sum(dim=0)
                    count += len(batch)
        total, count = (partition.gather(each.to(tokenizer.device)).sum(dim=0).cpu() for each in (total, count))
        return (total.double() / count).round().to(torch.uint8)

    def _notes(self, model: CLIP, rows: Sequence[PixelRow], methods: Methods) -> list[str]:
        notes, size = list[str](), model.image.require_pixels().image_size
        if self.meaning and not hasattr(model, "text"):
            notes.append("no zero-shot accuracy or R@1 of the reconstructions: the tokenizer is one of images alone")
        for metric, least in (("SSIM", SSIM_SIZE), ("MS-SSIM", MS_SSIM_SIZE)):
            if size < least:
                notes.append(f"no {metric}: it needs {least} pixels of height and width")
        if files := [row for row in rows if row.within is not None]:
            told = ", ".join(f"{row.method} {100 * (row.within or 0):.0f} %" for row in files)
            notes.append(
                f"files of at most {methods.budget} bytes, headers included: {told} of the images; of the others, the "
                "smallest file counts"
            )
        return notes


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
        config: prefixes and codecs.
        tokenizer: has a pixel decoder; in evaluation mode.
        ids: ``(m, N, C)``, the stored ids of this rank's images; None without codes.
        detail_file: file that stores the detail ids of a batch.
        inputs: batches of the same images as the tower takes them; None if the decoder's size is the tower's.
        mean: ``(3, S, S)`` uint8, mean of all images.
        distances: distances in the features of networks.
    """

    def __init__(
        self,
        config: PixelQualityConfig,
        tokenizer: ImageTokenizer,
        ids: Tensor | None,
        detail_file: Path,
        inputs: Iterator[EvalBatch] | None,
        mean: Tensor,
        distances: Distances,
    ):
        self._tokenizer, self._ids, self._detail_file = tokenizer, ids, detail_file
        self._inputs, self._mean, self._codecs, self._distances = inputs, mean, config.codecs, distances
        found = decoded_prefixes(tokenizer) if ids is not None else []
        shorter = {f"{CODES}, {each.label}": each for each in found[:-1] if config.prefixes}
        self._decoded = shorter | ({CODES: found[-1]} if found else {})
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


def describe_data(data: Any) -> str:
    """Return kind, path or name, and split of data in words, without credentials."""
    where = getattr(data, "path", None) or getattr(data, "name", None)
    if isinstance(where, tuple):
        where = f"{where[0]} and {len(where) - 1} more" if len(where) > 1 else where[0]
    parts = [data.kind, where, (split := getattr(data, "split", None)) and f"split {split}"]
    return mask_credentials(" ".join(str(part) for part in parts if part))


def _rows(columns: Sequence[Sequence[str]], values: Sequence[Sequence[float]], methods: Methods) -> list[PixelRow]:
    """Return a row for each method, from the values of all images, ``n`` times a value for each column."""
    table = torch.tensor(values, dtype=torch.float64).T.contiguous()
    intervals = mean_value_intervals(table)
    rows = []
    for method in dict.fromkeys(method for method, _ in columns):
        own = {metric: number for number, (each, metric) in enumerate(columns) if each == method}
        sizes = own.pop("bytes", None)
        between = {metric: intervals[number] for metric, number in own.items()}
        errors = between.pop("mse")
        between["psnr_of_mse"] = tuple(psnr(torch.tensor(errors[::-1], dtype=torch.float64)).tolist())
        figures = mean_figures({metric: table[number] for metric, number in own.items()})
        del figures["mse"]
        bits, within = methods.bits(method), None
        if sizes is not None:
            bits, within = 8 * float(table[sizes].mean()), float((table[sizes] <= methods.budget).double().mean())
        rows.append(PixelRow(method, bits, within, figures, between))
    return rows


class Meaning:
    """Meaning of a set's images: ``top1`` with the prompts of the data, or ``i2t_r1`` and ``t2i_r1`` of the captions.

    Every rank must make it, which encodes the prompts or captions.
    """

    def __init__(self, images: EncodedImages, tokenizer: TextTokenizer, encoder: Encoder, batch_size: int, name: str):
        names, templates = images.source.classnames, images.source.templates or (DEFAULT_TEMPLATE,)
        texts = fill_templates(templates, names) or images.annotations
        self._images, self._counts = images, torch.tensor([len(each) for each in texts])
        self.texts = int(self._counts.sum())
        self.text = encoder.captions(tokenizer, list(itertools.chain(*texts)), batch_size, name)
        chances = {"top1": 1 / len(names)} if names else chance(self._counts)
        self.chance = {figure: rate for figure, rate in chances.items() if figure in ("top1", "i2t_r1", "t2i_r1")}

    def figures(self, encoded: Encoded) -> tuple[dict[Mode, dict[str, float]], dict[Mode, dict[str, Interval]]]:
        """Return the rates of images, or of their reconstructions, and their intervals: of `chance` and others."""
        modes, text, counts = common_modes(encoded, self.text)[0], self.text.embeddings, self._counts
        if self._images.source.classnames:
            targets, labels = (
                {mode: class_embeddings(text[mode], counts.tolist()) for mode in modes},
                self._images.labels,
            )
            hits = {mode: each.hits(DEPTHS) for mode, each in rank_classes(encoded, targets, labels).items()}
            rates = {mode: class_figures(each, labels) for mode, each in hits.items()}
            return rates, class_intervals(CLASS_FIGURES, hits, labels)
        ranks = {mode: both_ranks(encoded.embeddings[mode], text[mode], counts) for mode in modes}
        return {mode: recalls(each) for mode, each in ranks.items()}, recall_intervals(ranks, counts)
