"""Metrics of a step: written, shown, and checked for signs of collapse and divergence."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from vqclip import dist
from vqclip.quantizers import Stats, sync
from vqclip.train.callbacks.base import Callback, Training
from vqclip.train.speed import SpeedMeter

logger = logging.getLogger(__name__)

_TOKENS = "tokens of the step"


class ReportMetrics(Callback):
    """Write a line of metrics and move the progress bar every ``train.report_every`` steps; warn in words.

    All ranks compute the metrics, so that all keep the same state of the watches; rank 0 writes.
    """

    def __init__(self) -> None:
        self._warned_of_cut_captions = False

    def on_train_start(self, training: Training) -> None:
        """Begin to measure."""
        self._speed = SpeedMeter(training.config.run.peak_tflops)

    def on_step_start(self, training: Training) -> None:
        """Count the FLOPs of the first step, and the time that timed steps spend in collectives."""
        self._speed.count(training.step, training.batch)
        if training.clock.runs:
            dist.exchange_timer.start()

    def on_step_end(self, training: Training) -> None:
        """Report, if a report is due."""
        dist.exchange_timer.stop()
        if not training.is_due(training.config.train.report_every):
            return
        figures, tokens = _metrics(training)
        figures |= training.records.bad.figures()
        if lap := training.clock.lap(dist.exchange_timer.lap()):
            figures |= lap | self._speed.figures(
                lap["images_per_second"], tokens / training.config.train.batch_size, training.step.device
            )
        training.records.record(training.done, figures)
        training.bar.show(figures)
        self._warn_of_cut_captions(training)

    def _warn_of_cut_captions(self, training: Training) -> None:
        """Warn once of captions that are longer than the text tower takes."""
        if self._warned_of_cut_captions:
            return
        length = training.step.task.context_length
        if length is None:
            return
        cut = training.records.bad.lengths.describe_cuts(length, "model.text.tower.context_length")
        if cut:
            logger.warning("captions: %s", cut)
            self._warned_of_cut_captions = True


def _metrics(training: Training) -> tuple[dict[str, float], float]:
    """Return the metrics of the last step, those of codebooks over a window of tokens, and its tokens. A collective."""
    step, result = training.step, training.result
    windows = step.guards.windows
    found: dict[str, float | Tensor] = {f"loss/{name}": term for name, term in result.terms.items()}
    found |= {**result.figures, "grad_norm": result.grad_norm, "lr": result.lr}
    if step.scaler.is_enabled():
        found |= {"fp16/scale": step.scaler.get_scale(), "fp16/skipped_steps": float(step.guards.overflows)}
    tokens = sum(_count_tokens(result.stats[name]) for name in step.task.quantizers() if name in result.stats)
    if windows is None:
        sums = dict(zip(result.stats, sync([*result.stats.values()]), strict=True))
    else:
        sums = windows.sums(result.stats)
    figures = _read(found | {_TOKENS: tokens} | step.task.metrics(sums, training.done - 1))
    settings = training.config.train
    if training.done % settings.report_every == 0 or training.done == settings.steps:
        _warn(training, figures)
    number = figures.pop(_TOKENS)
    return figures, number


def _count_tokens(stats: Stats) -> Tensor | float:
    """Return the () number of tokens that were quantized; stages and parts share them."""
    return next((each for name, each in stats.sums.items() if name.split("/")[-1] == "tokens"), 0.0)


def _read(figures: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return figures as numbers; those on the device are read at once."""
    tensors = {name: each for name, each in figures.items() if isinstance(each, Tensor)}
    numbers = torch.stack([each.detach().double().reshape(()) for each in tensors.values()]).tolist()
    known = dict(zip(tensors, numbers, strict=True))
    return {name: known[name] if isinstance(each, Tensor) else each for name, each in figures.items()}


def _warn(training: Training, figures: dict[str, float]) -> None:
    """Judge a report, and tell the new warnings."""
    step, done = training.step, training.done
    loss, chance = step.task.progress(figures, training.config.train.batch_size)
    codes = {name: each.codebook_sizes[0] for name, each in step.task.quantizers().items() if each.codebook_sizes}
    warming_up = done <= training.config.optim.warmup_steps
    for warning in step.guards.health.add(done, figures, loss, chance, codes, warming_up):
        training.records.warn(done, warning)
