"""Exponential moving average (EMA) of the weights: what is evaluated, kept as best and exported.

    decay(step)   = min(decay, (1 + step) / (10 + step))           with warmup, as in TensorFlow and timm
    average       = decay(step) · average + (1 - decay(step)) · weight

An average begins as a copy of its weight in the first update in which the weight is trained. The averages are part of
every checkpoint, are equal on all ranks, and change nothing in the training.

Codebooks that a gradient moves are weights, and averaged. Codebooks that follow statistics (VQ with ``learning: ema``)
are buffers, already averages over steps, and used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vqclip.checkpoint import Checkpoint
from vqclip.config import FREE, Config
from vqclip.errors import CheckpointError
from vqclip.io.tensors import first_names, nonfinite_names
from vqclip.tokenizer.folder import TokenizerFolder

Weights = Literal["averaged", "current"]
"""Weights of a checkpoint to use: averaged ones where it has them (`train.ema`), or those of its step."""

CURRENT = "current weights/"
"""Beginning of the names of evaluations of the current weights beside the averaged ones."""
AVERAGE = "ema/"
"""Beginning of the names of averages among the tensors of a checkpoint."""


class EmaConfig(Config):
    """Exponential moving average of the trained weights; evaluations, the best step and exports use it."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Share of the average that a step keeps: the average is over about 1 / (1 - decay) steps."""
    warmup: bool = True
    """Keep at most (1 + step) / (10 + step) at the beginning, so that the first weights are forgotten soon."""
    evaluate: Annotated[Literal["averaged", "both"], FREE] = "averaged"
    """Weights that are evaluated; both: also the current ones, as `eval/current weights/...` in `metrics.jsonl`."""

    def decay_at(self, step: int) -> float:
        """Return the share of the average that the update after step number ``step`` (from 0) keeps."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class Ema:
    """Moving average of the parameters of a model that require a gradient.

    Args:
        config: decay.
        parameters: of the bare model by name; of those in shards, this rank's rows.

    Attributes:
        averages: parameter name → average in float32, or in float64 for a float64 parameter.
    """

    def __init__(self, config: EmaConfig, parameters: Mapping[str, nn.Parameter]):
        self.config, self._parameters = config, parameters
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update the averages after step number ``step`` (from 0).

        Args:
            step: number of the step.
            skip: () bool on the device, True if the step was not applied: only averages that begin now change.
        """
        parameters = self._parameters
        shares = {
            dtype: torch.where(skip, 0.0, 1 - self.config.decay_at(step)).to(dtype)
            for dtype in {average.dtype for average in self.averages.values()}
        }
        for name, average in self.averages.items():
            average.lerp_(parameters[name].to(average.dtype), shares[average.dtype])
        for name, each in parameters.items():
            if each.requires_grad and name not in self.averages:
                self.averages[name] = each.detach().to(_dtype(each), copy=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages, named as in a checkpoint."""
        return {f"{AVERAGE}{name}": average for name, average in self.averages.items()}

    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Restore averages by parameter name; without any, they begin with the next update.

        Args:
            averages: accepted by `require_averages`; of weights in shards, this rank's rows.
        """
        self.averages = {
            name: torch.empty_like(self._parameters[name], dtype=each.dtype, requires_grad=False).copy_(each)
            for name, each in averages.items()
        }


@contextmanager
def replace_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give ``model`` other weights within the block, such as their averages, and its own, bit for bit, after it.

    Tensors change places: nothing is copied unless a weight has another dtype.
    """
    parameters, held = dict(model.named_parameters()), dict[str, Tensor]()
    try:
        for name, tensor in tensors.items():
            held[name] = parameters[name].data
            parameters[name].data = tensor.to(held[name].dtype)
        yield
    finally:
        for name, data in held.items():
            parameters[name].data = data


def averages_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averages among the tensors of a checkpoint, by parameter name."""
    return {name.removeprefix(AVERAGE): each for name, each in tensors.items() if name.startswith(AVERAGE)}


def read_averages(saved: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """Read the averages in a checkpoint of ``model``, by parameter name; empty if it has none.

    Averages of adapters are merged for a model without adapters, as exports are.

    Raises:
        CheckpointError: they do not fit the model, or contain NaN or infinity.
    """
    averages, parameters = averages_in(saved.tensors()), dict(model.named_parameters())
    try:
        if any(".lora_" in name for name in averages) and not any(".lora_" in name for name in parameters):
            averages = TokenizerFolder.open(saved.model_folder).weights.merge_adapters(averages)
        require_averages(parameters, averages)
    except CheckpointError as error:
        raise CheckpointError(f"{saved.path}: {error}") from error
    return averages


def require_averages(parameters: Mapping[str, nn.Parameter], averages: Mapping[str, Tensor]) -> None:
    """Check averages, by parameter name.

    Raises:
        CheckpointError: they do not fit the parameters of the model, or contain NaN or infinity.
    """
    wrong = [
        name
        for name, tensor in averages.items()
        if name not in parameters or (tensor.shape, tensor.dtype) != (parameters[name].shape, _dtype(parameters[name]))
    ]
    if wrong := wrong or nonfinite_names(averages):
        raise CheckpointError(
            f"averages of weights: {first_names(wrong)}: expected finite numbers in the shapes of the model's weights"
        )


def _dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
