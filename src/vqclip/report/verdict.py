"""Verdict on a run in plain words, from its curves, its summary and its evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from vqclip.losses import LossConfig
from vqclip.report.evaluations import Task
from vqclip.report.model_words import codebook_size
from vqclip.report.run_files import RunFiles, number_at, text_at, value_at
from vqclip.runlog.codebooks import MODALITIES, Codebook, modality_of, read_codebooks
from vqclip.runlog.health import (
    RECENT,
    REMEDY,
    RESTART,
    CollapseConfig,
    DivergenceConfig,
    Health,
    suggest_remedies,
)

Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
"""From worst to best."""

MANY_BAD = 0.1
"""Share of bad samples from which the data counts as ill."""
FEW_BAD = 0.01
"""Share of bad samples that is worth a warning: the default of ``data.max_bad_fraction``."""
UNUSED = 0.05
"""Share of the codes that evenly used codes would show, below which a codebook is hardly used."""
LONG_WAIT = 0.3
"""Share of the time spent waiting for data that is worth a warning."""
MAX_CODEBOOKS = 1000
"""Codebooks of a page; of more, none is shown."""


@dataclass(frozen=True)
class Finding:
    """One observation."""

    level: Level
    title: str
    """Observation in a few words."""
    text: str = ""
    """Observation in figures."""
    advice: str = ""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run."""

    level: Level
    headline: str
    findings: list[Finding]
    """Worst first."""


def judge(run: RunFiles, tasks: list[Task]) -> Verdict:
    """Judge a run.

    Args:
        run: its files.
        tasks: its newest evaluation.
    """
    health = read_health(run)
    found = [
        *_check_finite(run),
        *_check_health(health),
        *_check_samples(run),
        *_check_unused(health),
        *_check_waits(run),
        *_check_events(run),
        *_check_chance(tasks),
    ]
    found.sort(key=lambda finding: LEVELS.index(finding.level))
    ill = [finding for finding in found if finding.level in ("bad", "warn")]
    if ill:
        more = f" – and {len(ill) - 1} more" if len(ill) > 1 else ""
        return Verdict(ill[0].level, ill[0].title + more, found)
    if len(run.curves.steps) < 2:
        return Verdict("note", "Too early for a verdict", found)
    return Verdict("good", "Healthy", [_healthy(run), *found])


def newest_codebooks(run: RunFiles, modality: str) -> list[Codebook]:
    """Return the codebooks of the newest report that has them."""
    size = codebook_size(value_at(run.config, f"model.{modality}.quantizer"))
    needed = {f"{modality}/usage_if_uniform", f"{modality}/tokens"}
    values = next((each for each in reversed(run.curves.steps.values()) if needed <= each.keys()), None)
    if values is None or size is None or sum(name.endswith("/usage") for name in values) > MAX_CODEBOOKS:
        return []
    return read_codebooks(modality, values, size)


def read_health(run: RunFiles) -> Health:
    """Judge the recorded reports as the run did while it trained."""
    collapse, divergence = CollapseConfig(), DivergenceConfig()
    try:
        collapse = CollapseConfig.model_validate(value_at(run.config, "guards.collapse") or {})
        divergence = DivergenceConfig.model_validate(value_at(run.config, "guards.divergence") or {})
    except ValidationError:
        pass  # a forged configuration
    health = Health(collapse, divergence)
    codes = {
        modality: codebook_size(value_at(run.config, f"model.{modality}.quantizer")) or 0
        for modality in MODALITIES
        if newest_codebooks(run, modality)
    }
    chance, warm = _chance(run), number_at(run.config, "optim.warmup_steps") or 0
    for step, values in run.curves.steps.items():
        loss = values.get(_loss_name(run), math.nan), math.nan if chance is None else chance
        loss = (values["pixels/mse"], values["pixels/variance"]) if "pixels/variance" in values else loss
        health.add(step, values, *loss, codes, step <= warm)
    return health


def _healthy(run: RunFiles) -> Finding:
    steps, losses = run.curves.get(_loss_name(run))
    if not losses:
        return Finding("good", "No sign of collapse")
    first, last = losses[0], statistics.median(losses[-RECENT:])
    text = f"The loss {'fell' if last < first else 'went'} from {first:.3g} (step {steps[0]:,}) to {last:.3g}"
    chance = _chance(run)
    text += f"; a model that knows nothing has {chance:.3g}." if chance is not None else "."
    shares = [
        f"{_share(statistics.mean(each.usage for each in found))} of the {modality} codes"
        for modality in MODALITIES
        if (found := newest_codebooks(run, modality))
    ]
    if shares:
        text += f" In use over the newest tokens: {' and '.join(shares)}."
    return Finding("good", "No sign of collapse", text)


def _check_finite(run: RunFiles) -> Iterator[Finding]:
    """Find a loss or gradient that is not finite."""
    events = run.events.kinds.get("nonfinite", 0)
    names = [name for name in ("loss/total", "grad_norm") if not math.isfinite(run.curves.latest.get(name, 0.0))]
    if not events and not names:
        return
    found = [each for each in run.events.newest if each.get("event") == "nonfinite"]
    newest: dict[str, Any] = found[-1] if found else {}
    since = newest.get("step") or run.curves.last_step
    ended = not run.is_finished and run.done <= since
    advice = (
        "A lower optim.lr (a tenth), a longer optim.warmup_steps, optim.clip_grad_norm: 1; with fp16: train.precision: "
        "bf16. The samples of the step are in events.jsonl."
    )
    text = str(newest.get("reason") or f"{' and '.join(names)}: not finite after step {since:,}")[:500]
    level: Level = "bad" if ended or names or events > 20 else "warn"
    title = f"Diverged at step {since:,}: the loss or the gradient is not finite"
    yield Finding(level, title, f"{text}. {events:,} steps of this kind.", advice)


def _check_health(health: Health) -> Iterator[Finding]:
    """Find what the run has looked for while it trained: a dead model, collapsed codebooks, divergence."""
    dead, collapsed, diverged = (
        [sign for sign in health.signs if sign.kind == kind] for kind in ("dead", "collapsed", "diverged")
    )
    if dead:
        text = "; ".join(f"{sign.text} (since step {sign.since:,})" for sign in dead)
        since = min(sign.since for sign in dead)
        yield Finding("bad", f"Dead since step {since:,}: the model no longer learns", f"{text}.", f"{RESTART}.")
    for modality in MODALITIES:
        lost = [sign for sign in collapsed if modality_of(sign.name) == modality]
        if lost:
            since, every = min(sign.since for sign in lost), sum(each.modality == modality for each in health.codebooks)
            which = f"{len(lost)} of {every} {modality} codebooks"
            which = which if every > 1 else f"the {modality} codebook has few codes left"
            text = f"{health.describe(modality)}."
            yield Finding("bad", f"Collapsed since step {since:,}: {which}", text, f"{suggest_remedies(modality)}.")
    for sign in diverged:
        title = "Diverged: the loss is too high" if sign.name == "loss" else "Diverged: the gradient explodes"
        yield Finding("bad", title, f"{sign.text[0].upper()}{sign.text[1:]}.", f"{REMEDY}.")


def _check_unused(health: Health) -> Iterator[Finding]:
    """Find codebooks that use few codes, but have not collapsed."""
    collapsed = {sign.name for sign in health.signs if sign.kind == "collapsed"}
    for modality in MODALITIES:
        every = [each for each in health.codebooks if each.modality == modality and each.name not in collapsed]
        few = [each for each in every if each.usage < UNUSED * each.usage_if_uniform and each.tokens > 0]
        if few:
            text = f"Less than {_share(UNUSED)} of what evenly used codes would show: {_names(few)}."
            advice = f"Fewer codes do the same: a smaller codebook. {suggest_remedies(modality)}."
            yield Finding("warn", f"Hardly used: {len(few)} of {len(every)} {modality} codebooks", text, advice)


def _check_samples(run: RunFiles) -> Iterator[Finding]:
    """Find bad samples, replaced by others."""
    replaced = max(
        run.curves.latest.get("data/replaced", 0.0), run.bad_samples.total, number_at(run.summary, "replaced") or 0
    )
    if not math.isfinite(replaced) or replaced < 1:
        return
    shown = run.done * run.batch_size
    read = shown + replaced  # a substitute may be bad and be replaced, too
    share = replaced / read if shown else math.nan
    kinds = {
        name.removeprefix("data/replaced/").replace("_", " "): count
        for name, count in run.curves.latest.items()
        if name.startswith("data/replaced/") and math.isfinite(count)
    } or dict(run.bad_samples.kinds)
    named = ", ".join(
        f"{count:,.0f} × {kind[:80]}" for kind, count in sorted(kinds.items(), key=lambda each: -each[1])[:8]
    )
    text = f"{replaced:,.0f} of {read:,.0f} samples read could not be used and were replaced by others: {named}."
    advice = "vqclip data check names each one with its reason; mend or remove them. Some are listed below."
    if share >= FEW_BAD:
        level: Level = "bad" if share >= MANY_BAD else "warn"
        yield Finding(level, f"{_share(share)} of the samples were bad", text, advice)
    else:
        yield Finding("note", f"{replaced:,.0f} bad samples", text, advice)


def _check_waits(run: RunFiles) -> Iterator[Finding]:
    """Find a training that waits for its data."""
    waits = [value for value in run.curves.get("data_wait")[1] if math.isfinite(value)][-20:]
    if len(waits) >= 3 and (share := statistics.median(waits)) >= LONG_WAIT:
        text = f"{_share(share)} of the time of the newest reports."
        advice = "More data.workers; smaller stored images; shards on a local disk."
        yield Finding("note", "Much of the time is spent waiting for data", text, advice)


def _check_events(run: RunFiles) -> Iterator[Finding]:
    """Find steps with an unusually large loss, and captions that were cut."""
    if spikes := run.events.kinds.get("spike", 0):
        text = f"First at step {run.events.first_step or 0:,}; the samples of each are in events.jsonl."
        yield Finding("note", f"{spikes:,} steps with an unusually large loss", text)
    shown, cut = number_at(run.summary, "captions.shown") or 0, number_at(run.summary, "captions.cut") or 0
    if shown > 0 and cut / shown >= 0.05:
        title = f"{_share(cut / shown)} of the captions were cut"
        yield Finding("note", title, text_at(run.summary, "captions.told")[:500])


def _check_chance(tasks: list[Task]) -> Iterator[Finding]:
    """Find evaluations at chance."""
    judged = [row for task in tasks for row in task.rows if row.chance is not None]
    if judged and all(row.is_at_chance for row in judged):
        text = "Every figure of the newest evaluation is that of random embeddings."
        yield Finding("warn", "No better than chance", text, "Train longer, or see the findings above.")


def _chance(run: RunFiles) -> float | None:
    """Return the loss of a model that knows nothing; None if it is unknown."""
    try:
        loss: LossConfig = TypeAdapter(LossConfig).validate_python(value_at(run.config, "loss"))
        return float(loss.build().chance(run.batch_size)) if run.batch_size >= 2 else None
    except (ValidationError, ValueError, OverflowError):
        return None


def _loss_name(run: RunFiles) -> str:
    return f"loss/{text_at(run.config, 'loss.kind') or 'total'}"


def _names(codebooks: list[Codebook]) -> str:
    shown = ", ".join(each.name for each in codebooks[:20])
    return shown + (f" and {len(codebooks) - 20} more" if len(codebooks) > 20 else "")


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"
