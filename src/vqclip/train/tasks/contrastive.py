"""Contrastive training of an image and a text tokenizer: its task, and its configuration tree."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from vqclip import dist
from vqclip.config import FREE, Modality, parse_config
from vqclip.data import Batch
from vqclip.data.batch_maker import Tokenize
from vqclip.errors import ConfigError, DataError
from vqclip.losses import Loss, LossConfig, pair_keys
from vqclip.model import CLIP, ModelConfig
from vqclip.nn.precision import autocast
from vqclip.pixels.decoder import PIXELS_FILE
from vqclip.pixels.losses import PixelLosses, require_starts
from vqclip.quantizers import Order, Quantizer, Stats
from vqclip.tokenizer import Tokenizer
from vqclip.tokenizer.folder import PIXELS_PREFIX, WEIGHTS_FILE
from vqclip.tokenizer.saving import write_config
from vqclip.towers import ImageTower, TextTower
from vqclip.towers.base import FromStep
from vqclip.train.config import BottleneckConfig, TaskConfig
from vqclip.train.distillation import Distillation, DistillationConfig
from vqclip.train.feature_cache import FeatureMaker, tower_maker
from vqclip.train.recipe import head_settings, is_set
from vqclip.train.reconstruction import ReconstructingCLIP, error_metrics
from vqclip.train.tasks.base import RankBatch, Task, TaskOutput, copy_to_device

logger = logging.getLogger(__name__)


class ContrastiveTask(Task):
    """A model of two tokenizers, trained by a contrastive loss, the quantizers' losses, and terms that follow teachers.

    Args:
        model: on its device, not wrapped.
        loss: contrastive or sigmoid loss over the global batch.
        bottleneck: schedule by which the embedding begins with continuous vectors; None: codes from the first step.
        distillation: further terms of the loss, which follow teachers.
        pixels: losses of the images that `model.image.pixels` decodes; None if it has no decoder.
    """

    model: CLIP

    def __init__(
        self,
        model: CLIP,
        loss: Loss,
        bottleneck: BottleneckConfig | None = None,
        distillation: Distillation | None = None,
        pixels: PixelLosses | None = None,
    ):
        super().__init__(model)
        self.loss, self.bottleneck = loss, bottleneck
        self.distillation = Distillation((), model, seed=0) if distillation is None else distillation
        self.reconstruction = None if pixels is None else ReconstructingCLIP(model, pixels)

    @property
    def student(self) -> nn.Module:
        """The model, or a module around it that also decodes images."""
        return self.model if self.reconstruction is None else self.reconstruction

    @property
    def discriminators(self) -> nn.Module | None:
        """Discriminators of the losses on pixels."""
        return None if self.reconstruction is None else self.reconstruction.pixels.losses

    def require_shardable(self, what: str) -> None:
        """Raise ConfigError with a pixel decoder or teachers."""
        others = {"model.image.pixels": self.reconstruction is not None, "distillation": bool(self.distillation.terms)}
        if used := [key for key, is_used in others.items() if is_used]:
            raise ConfigError(f"{what} with {' and '.join(used)}; expected ddp, or a run without")

    def clipped_apart(self) -> list[list[nn.Parameter]]:
        """Return the tokenizers, the pixel decoder and the discriminators."""
        if self.reconstruction is None:
            return super().clipped_apart()
        decoder = dict.fromkeys(self.reconstruction.pixels.decoder.parameters())  # in one order on every rank
        others = [each for each in self.model.parameters() if each not in decoder]
        return [others, list(decoder), list(self.reconstruction.pixels.losses.parameters())]

    def local(self, batch: Batch) -> RankBatch:
        """Move a batch to the device, and run the frozen towers whose features are not in the cache.

        They run outside of the model that is compiled and wrapped, and once for both passes over microbatches.
        """
        model, dtype = self.model, self.model.image.pool.position.dtype
        given = {"images": batch.images, "texts": batch.texts, "places": batch.places, "sample_ids": batch.sample_ids}
        stored = {f"features/{name}": each for name, each in batch.features.items()}
        copies = copy_to_device(given | stored, self.device)
        images, tokens, places, sample_ids = (copies[name] for name in given)
        keys = pair_keys(self.loss.positives, sample_ids, tokens)  # of all columns: ranks leave out different ones
        features = {name: copies[f"features/{name}"].to(dtype) for name in batch.features}
        for tokenizer, inputs in ((model.image, images), (model.text, tokens)):
            if tokenizer.tower.is_frozen and tokenizer.modality not in features:
                with torch.no_grad(), autocast(self.device, self.precision):
                    features[tokenizer.modality] = tokenizer.tower_features(inputs)
        needed = model.text.needed_tokens(batch.texts)
        if "text" in features:
            features["text"] = features["text"][:, :needed]
        order = Order(places, batch.global_size)
        return RankBatch(images, tokens[:, :needed], order, batch.sizes, keys, features, batch.captions)

    def run(self, network: nn.Module, local: RankBatch, step: int) -> TaskOutput:
        """Return the embeddings, the statistics of the quantizers and of the terms on features, and the temperature."""
        inputs = {
            "images": local.images,
            "tokens": local.tokens,
            "image_features": local.features.get("image"),
            "text_features": local.features.get("text"),
            "keep_features": self.distillation.compares_features(step),
        }
        with nullcontext() if self.bottleneck is None else self.bottleneck.at(step, self.model):
            if self.reconstruction is None:
                out, decoded = network(**inputs), {}
            else:
                out, decoded = network(**inputs, places=local.order.places, step=step)
        rows = {"image": out.image.embedding, "text": out.text.embedding}
        stats = {"image": out.image.stats, "text": out.text.stats, **decoded}
        stats |= self.distillation.compare(out, local, step)
        return TaskOutput(rows, stats, _temperature(out.scale, out.bias))

    def shared(self) -> dict[str, Tensor]:
        """Return the temperature."""
        return _temperature(*self.model.temperature())

    def reduce(self, out: TaskOutput, local: RankBatch) -> dict[str, Stats]:
        """Return the quantizers' statistics, the terms on features and the sum of the embeddings, over all ranks."""
        totals = {name: each.detach().double().sum(dim=0) for name, each in out.rows.items()}
        totals["count"] = torch.full((), len(local), device=self.device)
        return super().reduce(TaskOutput(stats={**out.stats, "embedded": Stats(totals)}), local)

    def losses(
        self, out: TaskOutput, sums: Mapping[str, Stats], parts: Sequence[RankBatch], step: int
    ) -> tuple[dict[str, Tensor], dict[str, float | Tensor]]:
        """Return the contrastive loss, the quantizers' losses, and those of pixels and of teachers."""
        image, text, scale, bias = out.rows["image"], out.rows["text"], out.shared["scale"], out.shared.get("bias")
        keys = None if parts[0].keys is None else torch.cat([part.keys for part in parts if part.keys is not None])
        terms = {self.loss.name: self.loss(image, text, scale, bias, keys, parts[0].sizes)}
        weights: dict[str, float | Tensor] = {self.loss.name: 1.0}
        for modality, quantizer in self.quantizers().items():
            for name, term in quantizer.losses(sums[modality]).items():
                terms[f"{modality}/{name}"] = term
                weights[f"{modality}/{name}"] = quantizer.loss_weights[name]
        if "pixels" in sums:
            assert self.reconstruction is not None
            of_pixels, factors = self.reconstruction.pixels.losses.terms(sums["pixels"].sums, step)
            terms |= {f"pixels/{name}": term for name, term in of_pixels.items()}
            weights |= {f"pixels/{name}": factor for name, factor in factors.items()}
        with autocast(self.device, self.precision):
            further, their_weights = self.distillation.losses(image, text, scale, sums, parts, step)
        return terms | further, weights | their_weights

    def update(self, sums: Mapping[str, Stats]) -> None:
        """Limit the temperature, and update the codebooks."""
        self.model.clamp_temperature()
        super().update(sums)

    def tensors_to_update(self) -> list[Tensor]:
        """Return the temperature and the tensors of the quantizers."""
        return [self.model.logit_scale, *super().tensors_to_update()]

    def mark_dynamic(self, local: RankBatch) -> None:
        """Mark the length of the captions: one graph for all lengths."""
        torch._dynamo.maybe_mark_dynamic(local.tokens, 1)

    def move_to_step(self, step: int) -> bool:
        """Freeze and unfreeze the towers, the pixel decoder and the discriminators."""
        parts = [*self.towers.values(), *([] if self.reconstruction is None else [self.reconstruction])]
        return any([part.move_to_step(step) for part in parts])

    def computes_anew(self, step: int) -> bool:
        """Return whether the bottleneck, or a term of a teacher, has ended with the step before."""
        ends = {term.config.until_step for term in self.distillation.terms.values()}
        return step in ends or (self.bottleneck is not None and step == self.bottleneck.steps)

    def quantizers(self) -> dict[str, Quantizer]:
        """Return those of both tokenizers."""
        return self.model.quantizers()

    def figures(self, out: TaskOutput) -> dict[str, Tensor]:
        """Return the scale of the logits."""
        return {"temperature/scale": out.shared["scale"].detach()}

    def metrics(self, sums: Mapping[str, Stats], step: int) -> dict[str, float | Tensor]:
        """Return the share of the bottleneck, the quantizers' metrics, the similarity of the embeddings, and errors."""
        found: dict[str, float | Tensor] = {}
        if self.bottleneck is not None:
            found["bottleneck/share"] = self.bottleneck.share(step)
        found |= error_metrics(sums["errors"]) if "errors" in sums else {}
        for modality, quantizer in self.quantizers().items():
            found |= {f"{modality}/{name}": value for name, value in quantizer.metrics(sums[modality]).items()}
            # The mean of all pairs of unit vectors, from their sum.
            total, count = sums["embedded"][modality].double(), sums["embedded"]["count"].double()
            squares = total.square().sum() - count
            found[f"{modality}/embedding_cosine"] = squares / (count * (count - 1)).clamp(min=1)
        return found

    def progress(self, batch_size: int) -> tuple[str, float | str, float]:
        """Return the contrastive loss, its value at chance, and its lowest value."""
        return f"loss/{self.loss.name}", float(self.loss.chance(batch_size)), self.loss.lowest(batch_size)

    @property
    def tokenizers(self) -> dict[Modality, Tokenizer]:
        """Both tokenizers."""
        return {"image": self.model.image, "text": self.model.text}

    @property
    def tokenize(self) -> Tokenize:
        """Vocabulary of the text tower."""
        return self.model.text.preprocess.with_lengths

    @property
    def context_length(self) -> int:
        """Longest caption of the text tower."""
        return self.model.text.preprocess.context_length

    @property
    def towers(self) -> dict[str, ImageTower | TextTower]:
        """Both towers."""
        return {"image": self.model.image.tower, "text": self.model.text.tower}

    def weights_file(self, name: str) -> str:
        """Return that of the tokenizers, or of the pixel decoder."""
        return PIXELS_FILE if name.startswith(PIXELS_PREFIX) else WEIGHTS_FILE

    def write_model(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Make a tokenizer folder."""
        write_config(folder, self.model.section() | dict(extra), self.model.files())

    def export(self, folder: Path) -> None:
        """Write both tokenizers and the temperature."""
        self.model.save_pretrained(folder)


def _temperature(scale: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {"scale": scale} | ({} if bias is None else {"bias": bias})


@torch.no_grad()
def towers_draw(model: CLIP) -> bool:
    """Return whether the towers of ``model`` draw random numbers when they train: dropout, stochastic depth.

    Runs the towers and compares the generators' states, as the modules that draw have many names. The generators are
    left unchanged.
    """
    gpus = [model.logit_scale.device] if model.logit_scale.is_cuda else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

    with torch.random.fork_rng(devices=gpus):
        before = states()
        for tower in (model.image.tower, model.text.tower):
            with tower.unfrozen():
                tower(tower.example())
        return any(not old.equal(new) for old, new in zip(before, states(), strict=True))


class TrainConfig(TaskConfig):
    """Whole configuration of a contrastive run."""

    task: Literal["contrastive"] = "contrastive"
    """Contrastive training of an image and a text tokenizer."""
    model: ModelConfig
    """The two tokenizers."""
    loss: LossConfig
    """The loss over the global batch."""
    distillation: tuple[DistillationConfig, ...] = ()
    """Further terms of the loss, which follow frozen teachers."""
    recipe: Annotated[Literal["heads"] | None, FREE] = None
    """heads: for frozen towers; batch size, steps, stored views and dropout follow from the number of samples, where
    they are not set. The run prints them. null: what is not set has its default."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> TrainConfig:
        needs, bias = self.loss.needs_bias, self.model.temperature.bias
        if needs and bias is None:
            raise ValueError(
                f"loss.kind {self.loss.kind!r} needs model.temperature.bias (SigLIP starts at -10); got null"
            )
        if bias is not None and not needs:
            raise ValueError(
                f"loss.kind {self.loss.kind!r} does not use model.temperature.bias; got {bias}, expected null"
            )
        for name in ("image", "text"):
            train = getattr(self.model, name).tower.train
            if isinstance(train, FromStep) and train.from_step >= self.train.steps:
                raise ValueError(
                    f"model.{name}.tower.train.from_step: got {train.from_step}, but the run has {self.train.steps} "
                    "steps; expected fewer, or `train: none`"
                )
        if getattr(self.model.image.tower, "patch_dropout", 0):
            others = [f"distillation of {each.kind}" for each in self.distillation if each.kind == "image_features"]
            others += ["model.image.pixels"] if self.model.image.pixels is not None else []
            if others:
                raise ValueError(
                    f"model.image.tower.patch_dropout: got a number above 0 with {others[0]}, which needs every patch; "
                    "expected one of the two"
                )
        stores_images = "image" in self.cached_modalities
        if self.model.image.tower.kind == "naflex":
            others = [f"distillation of {each.kind}" for each in self.distillation if each.kind != "text_features"]
            others += ["data.feature_cache of image features"] if stores_images else []
            if others:
                raise ValueError(
                    f"model.image.tower.kind: got naflex, whose images have any shape, with {others[0]}, which needs "
                    "square images of one size; expected a tower with an image_size, or a run without it"
                )
        for term in self.distillation:
            if stores_images and term.kind != "text_features" and not self.stores_teacher(term):
                raise ValueError(
                    f"data.feature_cache.teachers: got false with a distillation term of kind {term.kind}, whose "
                    "teacher needs images, which stored image features replace; expected true, or modalities: [text]"
                )
        if (pixels := self.model.image.pixels) is None:
            return self
        key, in_run = "model.image.pixels", f"in a run of {self.train.steps} steps of {self.train.batch_size} samples"
        if pixels.start_step >= self.train.steps:
            raise ValueError(
                f"{key}.start_step: got {pixels.start_step}; expected at most {self.train.steps - 1} {in_run}"
            )
        if pixels.one_in > self.train.batch_size:
            raise ValueError(f"{key}.one_in: got {pixels.one_in}; expected at most {self.train.batch_size} {in_run}")
        require_starts(pixels.losses, self.train.steps, f"{key}.losses")
        if stores_images:
            raise ValueError(
                f"{key}: got a pixel decoder with data.feature_cache, whose stored image features replace the images "
                "that it learns from; expected modalities: [text] there, or no feature cache"
            )
        return self

    def fit(self) -> TrainConfig:
        """Return the configuration with the settings that follow from the number of samples. A collective."""
        if self.recipe is None:
            return self
        samples = self.data.samples_of_an_epoch()
        if others := dist.differing_ranks(samples):
            raise DataError(f"data.sources: rank 0 has {samples:,} samples, but ranks {', '.join(others)} have others")
        batch = self.train.batch_size if is_set(self, "train.batch_size") else None
        settings = head_settings(samples, batch).items()
        chosen = [f"{path}={json.dumps(value)}" for path, value in settings if is_set(self, path) is False]
        if chosen and dist.is_main():
            logger.info("recipe %s for %s samples: %s", self.recipe, f"{samples:,}", " ".join(chosen))
        return parse_config(TrainConfig, self, [*chosen, "recipe=null"])

    def has_codes(self) -> bool:
        """Return whether both tokenizers have codes."""
        return "identity" not in (self.model.image.quantizer.kind, self.model.text.quantizer.kind)

    def build_task(self, device: torch.device) -> ContrastiveTask:
        """Build the model with the weights of the first step, and all that trains it. A collective.

        Weights that are not pretrained are drawn from torch's global generator.
        """
        model = self.model.build()
        if model.inherited:
            logger.info("%s", model.inherited)
        model = model.to(device, self.dtype)
        distillation = Distillation(self.distillation, model, self.run.seed)
        losses = None
        if (pixels := self.model.image.pixels) is not None:
            size, key = model.image.tower.image_size, "model.image.pixels.losses"
            losses = PixelLosses(pixels.losses, size, self.run.seed, key).to(device, self.dtype)
        return ContrastiveTask(model, self.loss.build(), self.train.bottleneck, distillation, losses)

    def feature_makers(self, task: Task) -> dict[str, FeatureMaker]:
        """Return a maker for each network whose outputs are stored before the first step, by name."""
        assert isinstance(task, ContrastiveTask)
        makers: dict[str, FeatureMaker] = {name: tower_maker(task.tokenizers[name]) for name in self.cached_modalities}
        for term in task.distillation.terms.values():
            makers |= term.makers() if self.stores_teacher(term.config) else {}
        return makers

    def release_stored(self, task: Task) -> None:
        """Drop the networks whose outputs batches contain from now on."""
        assert isinstance(task, ContrastiveTask)
        for term in task.distillation.terms.values():
            term.teacher = None if self.stores_teacher(term.config) else term.teacher

    def stores_teacher(self, term: DistillationConfig) -> bool:
        """Return whether all that a term's teacher computes is stored before the first step."""
        cache = self.data.feature_cache
        repeats = self.data.views is not None or term.kind == "text_features"
        return cache is not None and cache.teachers and repeats

    @property
    def cached_modalities(self) -> tuple[Modality, ...]:
        """Modalities whose towers' features are stored before the first step."""
        if self.data.feature_cache is None:
            return ()
        training: dict[Modality, object] = {"image": self.model.image.tower.train, "text": self.model.text.tower.train}
        alone = not any(self.stores_teacher(term) for term in self.distillation)
        views = 1 if self.recipe and self.data.views is None else self.data.views  # `fit` will choose their number
        return self.data.feature_cache.choose(training, views, alone=alone)

    def run_identity(self, task: Task, samples: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that define the trajectory: they must be the same when a run resumes.

        If the towers draw random numbers, the numbers of processes and of microbatches are among them, because every
        rank draws for each of its microbatches. Files that a tower's folder contains can change between a run and its
        resumption, while the configuration that names them stays, so what is read from them is among them too.

        Args:
            task: with the weights of the first step.
            samples: fingerprint of the data.
        """
        assert isinstance(task, ContrastiveTask)
        stored: dict[str, Any] = {}
        if (cache := self.data.feature_cache) is not None and (cache.dtype != "fp32" or self.train.precision == "fp64"):
            stored = {"dtype": cache.dtype, "modalities": list(self.cached_modalities)}  # the values are rounded
            if teachers := [term.kind for term in self.distillation if self.stores_teacher(term)]:
                stored["teachers"] = teachers
        settings = super().run_identity(task, samples | ({"feature_cache": stored} if stored else {}))
        # With digests of their networks in place of paths.
        settings["distillation"] = task.distillation.identity
        if task.reconstruction is not None:
            settings["model"]["image"]["pixels"]["losses"] = task.reconstruction.pixels.losses.identity
        for modality, tokenizer in task.tokenizers.items():
            given = getattr(self.model, modality).tower.model_dump(mode="json")
            complete = tokenizer.config.tower.model_dump(mode="json")
            read = {name: value for name, value in complete.items() if value != given[name]}
            read |= {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files().items()}
            if read:
                settings[f"model.{modality}.tower (from its folder)"] = read
        if towers_draw(task.model):
            settings["processes (dropout is drawn by rank)"] = dist.world_size()
            settings["train.micro_batches (dropout is drawn by microbatch)"] = self.train.micro_batches
        return settings
