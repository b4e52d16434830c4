"""Training of a pixel decoder from the codes of a frozen, exported tokenizer.

    images → tokenizer (frozen) → ids → code vectors → pixel decoder → images → losses on pixels
               └ or stored ids (`data.feature_cache`)

The ids are those of ``tokenizer.encode`` in fp32, in chunks of one shape: they depend neither on the batch, nor on the
number of processes, nor on `train.precision`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import FREE, Modality
from vqclip.data import Batch
from vqclip.data.batch_maker import Tokenize
from vqclip.data.features import TORCH_DTYPES
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import Strict, read_plain, write_plain
from vqclip.model import CLIP, ImageModel, load_pretrained
from vqclip.pixels import (
    ConvolutionalPixelsConfig,
    DetailConfig,
    PixelDecoder,
    PixelDecoderConfig,
    PixelsConfig,
    attach,
)
from vqclip.pixels.detail import pixels_per_token
from vqclip.pixels.losses import PixelLosses, PixelLossesConfig, require_starts
from vqclip.pixels.terms import PixelErrorConfig
from vqclip.quantizers import Order, Quantizer, Stats
from vqclip.seeds import derive_seed
from vqclip.tokenizer import ImageTokenizer, Tokenizer
from vqclip.tokenizer.stored import fingerprint
from vqclip.towers.base import run_in_chunks
from vqclip.train.config import TaskConfig
from vqclip.train.feature_cache import FeatureMaker
from vqclip.train.reconstruction import Reconstruction, error_metrics
from vqclip.train.tasks.base import RankBatch, Task, TaskOutput, copy_to_device

IDS = "ids"
"""Name of the stored ids of images among the features of a batch."""
_DESCRIPTION = "pixels.json"
"""File of a checkpoint with the tokenizer's fingerprint and the decoder's configuration."""


class _Described(Strict):
    tokenizer: str
    pixels: PixelsConfig


class PixelTask(Task):
    """A pixel decoder that is trained for a frozen tokenizer.

    Args:
        whole: frozen, in evaluation mode; with the image tokenizer as ``image``, and perhaps that of texts.
        decoder: attached to it.
        losses: compare decoded images with real ones.
    """

    def __init__(self, whole: nn.Module, decoder: PixelDecoder, losses: PixelLosses):
        # Named as in the exported folder.
        super().__init__(nn.ModuleDict({"image": nn.ModuleDict({"pixels": decoder})}))
        self.whole, self.decoder, self.pixel_losses = whole, decoder, losses
        self._student = Reconstruction(decoder, losses)
        self.digest = fingerprint(self.image)
        """Fingerprint of the tokenizer."""

    @property
    def image(self) -> ImageTokenizer:
        """The image tokenizer."""
        assert isinstance(self.whole.image, ImageTokenizer)
        return self.whole.image

    @property
    def student(self) -> nn.Module:
        """Decoder and losses."""
        return self._student

    @property
    def discriminators(self) -> nn.Module | None:
        """Discriminators of the losses."""
        return self.pixel_losses if any(True for _ in self.pixel_losses.parameters()) else None

    def encode(self, images: Tensor) -> Tensor:
        """Return the ids ``(B, N, C)`` of images ``(B, 3, H, W)`` uint8; equal in every batch."""
        return run_in_chunks(self.image.encode, images)

    def local(self, batch: Batch) -> RankBatch:
        """Move the images to the device, and encode them unless their ids are stored."""
        given = {"images": batch.images, "places": batch.places}
        copies = copy_to_device(
            given | {name: each for name, each in batch.features.items() if name == IDS}, self.device
        )
        images, order = copies["images"], Order(copies["places"], batch.global_size)
        ids = copies[IDS].long() if IDS in copies else self.encode(images)
        with torch.no_grad():
            quantizer, stages = self.image.quantizer, self.decoder.stages
            vectors = quantizer.decode(ids if stages is None else quantizer.truncate(ids, stages))
        return RankBatch(images, batch.texts, order, batch.sizes, None, {"vectors": vectors}, batch.captions)

    def run(self, network: nn.Module, local: RankBatch, step: int) -> TaskOutput:
        """Return the sums of the losses."""
        return TaskOutput(stats=network(local.features["vectors"], local.images, local.order.places, step))

    def losses(
        self, out: TaskOutput, sums: Mapping[str, Stats], parts: Sequence[RankBatch], step: int
    ) -> tuple[dict[str, Tensor], dict[str, float | Tensor]]:
        """Return the losses on pixels, and those of the detail codebooks."""
        terms, weights = self.pixel_losses.terms(sums["pixels"].sums, step)
        for name, quantizer in self.quantizers().items():
            for term, value in quantizer.losses(sums[name]).items():
                terms[f"{name}/{term}"], weights[f"{name}/{term}"] = value, quantizer.loss_weights[term]
        return terms, weights

    def move_to_step(self, step: int) -> bool:
        """Freeze or unfreeze the discriminators."""
        return self.pixel_losses.move_to_step(step)

    def quantizers(self) -> dict[str, Quantizer]:
        """Return that of the detail codebooks."""
        return {} if self.decoder.detail is None else {"detail": self.decoder.detail.quantizer}

    def metrics(self, sums: Mapping[str, Stats], step: int) -> dict[str, float | Tensor]:
        """Return the metrics of the errors and of the detail codebooks."""
        found: dict[str, float | Tensor] = {**error_metrics(sums["errors"])}
        for name, quantizer in self.quantizers().items():
            found |= {f"{name}/{key}": value for key, value in quantizer.metrics(sums[name]).items()}
        return found

    def progress(self, batch_size: int) -> tuple[str, float | str, float]:
        """Return the squared error, and that of an image of the mean colour."""
        return "pixels/mse", "pixels/variance", 0.0

    @property
    def tokenizers(self) -> dict[Modality, Tokenizer]:
        """The frozen tokenizers."""
        text = getattr(self.whole, "text", None)
        return {"image": self.image} | ({} if text is None else {"text": text})

    @property
    def evaluated(self) -> nn.Module:
        """The frozen tokenizers, with the decoder."""
        return self.whole

    @property
    def trained_parts(self) -> dict[str, nn.Module]:
        """The decoder."""
        return {"decoder": self.decoder}

    @property
    def tokenize(self) -> Tokenize:
        """Nothing of a caption."""
        return _ignore_captions

    def write_model(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write what the decoder belongs to."""
        described = _Described(tokenizer=self.digest, pixels=self.decoder.config)
        write_plain(folder / _DESCRIPTION, described.model_dump(mode="json"))

    def require_own(self, folder: Path) -> None:
        """Compare the tokenizer of a checkpoint with this one."""
        found = read_plain(folder / _DESCRIPTION, _Described).tokenizer
        if found != self.digest:
            raise CheckpointError(
                f"{folder}: was trained for the tokenizer {found[:16]}..., and the folder in config.yaml now contains "
                f"{self.digest[:16]}...; restore the tokenizer"
            )

    def export(self, folder: Path) -> None:
        """Write the tokenizer's folder, with the decoder."""
        assert isinstance(self.whole, CLIP | ImageModel)
        self.whole.save_pretrained(folder)


def _ignore_captions(captions: list[str]) -> tuple[Tensor, Sequence[int]]:
    return torch.zeros(len(captions), 1, dtype=torch.int64), [0] * len(captions)


class PixelTrainConfig(TaskConfig):
    """Whole configuration of a run that trains a pixel decoder for an exported tokenizer."""

    task: Literal["pixels"] = "pixels"
    """A pixel decoder, from the codes of a frozen tokenizer."""
    tokenizer: Annotated[str, FREE]
    """Folder of the tokenizer, such as `runs/base/tokenizer`, or a hub name (owner/name). Nothing in it changes."""
    decoder: PixelDecoderConfig = ConvolutionalPixelsConfig()
    """From the vectors of the codes to pixels."""
    detail: DetailConfig | None = None
    """Further codebooks, whose ids hold what the tokenizer's ids leave out; null: none."""
    losses: PixelLossesConfig = (PixelErrorConfig(),)
    """Differences between decoded and real images."""

    @model_validator(mode="after")
    def _no_setting_is_without_effect(self) -> PixelTrainConfig:
        require_starts(self.losses, self.train.steps)
        if self.train.bottleneck is not None:
            raise ValueError(
                "train.bottleneck: got a schedule with task: pixels, whose tokenizer is frozen; expected null"
            )
        if self.train.activation_checkpointing:
            raise ValueError(
                f"train.activation_checkpointing: got {str(self.train.activation_checkpointing).lower()} with task: "
                "pixels, which trains no tower; expected false; train.micro_batches saves memory"
            )
        if self.train.compile == "regional":
            raise ValueError(
                "train.compile: got regional with task: pixels, which trains no tower; expected true or false"
            )
        cache = self.data.feature_cache
        if cache is not None and self.data.views is None:
            raise ValueError(
                "data.views: got null, a new view of each image in every epoch, with a data.feature_cache of ids; "
                "expected the number of views to store, such as 1"
            )
        if cache is not None and cache.modalities not in (None, ("image",)):
            raise ValueError(f"data.feature_cache.modalities: got {list(cache.modalities or ())}; expected [image]")
        return self

    def build_task(self, device: torch.device) -> PixelTask:
        """Load the tokenizer and make the decoder. A collective.

        Raises:
            CheckpointError: the tokenizer is missing or damaged; on every rank.
            ConfigError: it has no codes on a square grid, or ranks have loaded different tokenizers; on every rank.
        """
        with dist.raise_on_all_ranks():
            whole = _load_frozen(self.tokenizer).to(device)
            image = whole.image
            image.require_codes(f"tokenizer: {self.tokenizer}:")
            config = PixelsConfig(decoder=self.decoder, image_size=image.tower.image_size, detail=self.detail)
            try:
                pixels_per_token(image.num_tokens, config.image_size)
            except ConfigError as error:
                raise ConfigError(f"tokenizer: {self.tokenizer}: {error}") from error
            torch.manual_seed(derive_seed(self.run.seed, "pixel decoder"))  # loading has drawn numbers
            decoder = config.build(image.quantizer.dim, image.num_tokens).to(device, self.dtype)
            try:
                attach(image, decoder)
            except ConfigError as error:  # which names the keys of a model
                raise ConfigError(str(error).removeprefix("pixels.")) from error
        losses = PixelLosses(self.losses, decoder.image_size, self.run.seed).to(device, self.dtype)
        task = PixelTask(whole, decoder, losses)
        texts = [fingerprint(each) for name, each in task.tokenizers.items() if name == "text"]
        if others := dist.differing_ranks([task.digest, *texts]):
            raise ConfigError(
                f"tokenizer: {self.tokenizer}: rank {', '.join(others)} loaded another tokenizer than rank 0; expected "
                "the same files, byte for byte, on every machine"
            )
        return task

    def feature_makers(self, task: PixelTask) -> dict[str, FeatureMaker]:
        """Return a maker of the ids."""
        if self.data.feature_cache is None:
            return {}
        image, dtype = task.image, self.data.feature_cache.dtype
        largest = 2 / torch.finfo(TORCH_DTYPES[dtype]).eps
        if max(image.codebook_sizes) > largest:
            raise ConfigError(
                f"data.feature_cache.dtype: got {dtype}, which has no room for the ids of codebooks of "
                f"{max(image.codebook_sizes)} codes; expected fp32 and at most {2**24} codes"
            )
        maker = FeatureMaker(
            "image",
            "image tokenizer",
            lambda images: task.encode(images).float(),
            image.num_tokens,
            len(image.codebook_sizes),
            task.device,
            {"ids": task.digest},
        )
        return {IDS: maker}

    def run_identity(self, task: PixelTask, samples: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of the configuration, with digests of the tokenizer and of networks of losses."""
        own = {"tokenizer": task.digest, "losses": task.pixel_losses.identity}
        return super().run_identity(task, samples) | own


def _load_frozen(name: str) -> CLIP | ImageModel:
    """Return the tokenizers of a folder, in evaluation mode and without gradients; a decoder of it is left out."""
    try:
        whole = load_pretrained(name)
    except CheckpointError as error:
        remedy = "" if Path(name).expanduser().exists() else "; a run with task: contrastive exports one"
        raise CheckpointError(f"tokenizer: {error}{remedy}") from error
    whole.image.pixels = None
    return whole.eval().requires_grad_(False)
