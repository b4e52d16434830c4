"""Contrastive training of an image and a text tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.data import Batch
from vqclip.data.batch_maker import Tokenize
from vqclip.errors import ConfigError
from vqclip.losses import Loss
from vqclip.model import CLIP
from vqclip.nn.precision import Precision, autocast
from vqclip.pixels.losses import PixelLosses
from vqclip.quantizers import Quantizer, Stats, sync
from vqclip.seeds import derive_seed
from vqclip.tokenizer import Tokenizer
from vqclip.tokenizer.saving import write_tokenizer_files
from vqclip.towers import ImageTower, TextTower
from vqclip.train.config import BottleneckConfig
from vqclip.train.distillation import Distillation
from vqclip.train.pixel_sums import error_metrics
from vqclip.train.reconstruction import ReconstructingCLIP
from vqclip.train.tasks.base import RankBatch, Task, TaskOutput, make_rank_batch

__all__ = ["ContrastiveTask", "towers_draw"]


class ContrastiveTask(Task[RankBatch]):
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
        self.loss, self.bottleneck, self.distillation = loss, bottleneck, distillation
        self.reconstruction = None if pixels is None else ReconstructingCLIP(model, pixels)

    @property
    def student(self) -> nn.Module:
        """The model, or a module around it that also decodes images."""
        return self.model if self.reconstruction is None else self.reconstruction

    @property
    def discriminators(self) -> nn.Module | None:
        """Discriminators of the losses on pixels."""
        return None if self.reconstruction is None else self.reconstruction.losses

    def require_shardable(self, what: str) -> None:
        """Raise ConfigError with a pixel decoder or teachers."""
        others = {"model.image.pixels": self.reconstruction, "distillation": self.distillation}
        if used := [key for key, each in others.items() if each is not None]:
            raise ConfigError(f"{what} with {' and '.join(used)}; expected ddp, or a run without")

    def clipped_apart(self) -> list[list[nn.Parameter]]:
        """Return the tokenizers, the pixel decoder and the discriminators."""
        if self.reconstruction is None:
            return super().clipped_apart()
        decoder = set(self.reconstruction.decoder.parameters())
        others = [each for each in self.model.parameters() if each not in decoder]
        return [others, list(decoder), list(self.reconstruction.losses.parameters())]

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.logit_scale.device

    def local(self, batch: Batch) -> RankBatch:
        """Move a batch to the device, and run the frozen towers whose features are not in the cache."""
        return make_rank_batch(batch, self.model, self.loss.positives, self.precision)

    def run(self, network: nn.Module, local: RankBatch, step: int) -> TaskOutput:
        """Return the embeddings, the statistics of the quantizers and of the terms on features, and the temperature."""
        compares = self.distillation is not None and self.distillation.compares_features(step)
        known = (local.features.get("image"), local.features.get("text"))
        inputs = (local.images, local.tokens, *known, compares)
        with nullcontext() if self.bottleneck is None else self.bottleneck.at(step, self.model):
            if self.reconstruction is None:
                out, stats = network(*inputs), {}
            else:
                out, stats = network(*inputs, places=local.order.places, step=step)
        rows = {"image": out.image.embedding, "text": out.text.embedding}
        stats = {"image": out.image.stats, "text": out.text.stats, **stats}
        if compares:
            assert self.distillation is not None
            stats["distillation"] = self.distillation.compare(out, local, step)
        return TaskOutput(rows, stats, _temperature(out.scale, out.bias))

    def shared(self) -> dict[str, Tensor]:
        """Return the temperature."""
        return _temperature(*self.model.temperature())

    def reduce(self, out: TaskOutput, local: RankBatch) -> dict[str, Stats]:
        """Return the quantizers' statistics, the terms on features and the sum of the embeddings, over all ranks."""
        totals = {name: each.detach().double().sum(dim=0) for name, each in out.rows.items()}
        totals["count"] = torch.full((), len(local), device=self.device)
        *found, embedded = sync([*out.stats.values(), Stats(totals)], local.order, histograms=False)
        return dict(zip(out.stats, found, strict=True)) | {"embedded": embedded}

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
        if self.reconstruction is not None:
            of_pixels = self.reconstruction.terms(sums, step)
            terms, weights = terms | of_pixels[0], weights | of_pixels[1]
        if self.distillation is None:
            return terms, weights
        with autocast(self.device, self.precision):
            further = self.distillation.losses(image, text, scale, sums.get("distillation"), parts, step)
        return terms | further[0], weights | further[1]

    def update(self, sums: Mapping[str, Stats]) -> None:
        """Limit the temperature, and update the codebooks."""
        self.model.clamp_temperature()
        for name, quantizer in self.quantizers().items():
            quantizer.update(sums[name])

    def tensors_to_update(self) -> list[Tensor]:
        """Return the temperature and the tensors of the quantizers."""
        return [self.model.logit_scale, *super().tensors_to_update()]

    def configure(self, seed: int, precision: Precision) -> None:
        """Key the quantizers' draws."""
        super().configure(seed, precision)
        for name, quantizer in self.quantizers().items():
            quantizer.set_seed(derive_seed(seed, "quantizer", name))

    def mark_dynamic(self, local: RankBatch) -> None:
        """Mark the length of the captions: one graph for all lengths."""
        torch._dynamo.maybe_mark_dynamic(local.tokens, 1)

    def move_to_step(self, step: int) -> bool:
        """Freeze and unfreeze the towers, the pixel decoder and the discriminators."""
        parts = [*self.towers.values(), *([] if self.reconstruction is None else [self.reconstruction])]
        return any([part.move_to_step(step) for part in parts])

    @property
    def changing_steps(self) -> set[int | None]:
        """First steps of towers and of losses on pixels, and the ends of the bottleneck and of terms of teachers."""
        steps: set[int | None] = {tower.first_step for tower in self.towers.values()}
        steps.add(None if self.bottleneck is None else self.bottleneck.steps)
        steps |= set() if self.reconstruction is None else self.reconstruction.changing_steps
        return steps | (set() if self.distillation is None else self.distillation.ends)

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
            found[f"{modality}/embedding_cosine"] = _mean_cosine(sums["embedded"], modality)
        return found

    def progress(self, batch_size: int) -> tuple[str, float | str]:
        """Return the contrastive loss, and its value at chance."""
        return f"loss/{self.loss.name}", float(self.loss.chance(batch_size))

    @property
    def tokenizers(self) -> dict[Modality, Tokenizer]:
        """Both tokenizers."""
        return {"image": self.model.image, "text": self.model.text}

    @property
    def evaluated(self) -> CLIP:
        """The model."""
        return self.model

    @property
    def trained_parts(self) -> dict[str, nn.Module]:
        """Both tokenizers."""
        return {"image": self.model.image, "text": self.model.text}

    @property
    def image_size(self) -> int:
        """Size that the image tower takes."""
        return self.model.image.tower.image_size

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

    def write_model(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Make a tokenizer folder."""
        write_tokenizer_files(folder, self.model.section() | dict(extra), None, self.model.files())

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
    device = model.logit_scale.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = _generator_states(device)
        for tower in (model.image.tower, model.text.tower):
            with tower.unfrozen():
                tower(tower.example())
        return any(not old.equal(new) for old, new in zip(before, _generator_states(device), strict=True))


def _generator_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _mean_cosine(embedded: Stats, modality: str) -> Tensor:
    """Return the () mean cosine of all pairs of a batch of unit vectors, from their sum and ``count``."""
    count = embedded["count"].double()
    return (embedded[modality].double().square().sum() - count) / (count * (count - 1)).clamp(min=1)
