"""Verdict on a run in plain words, from its curves, its summary and its evaluations."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vqclip.io.tensors import first_names
from vqclip.report.run_files import RunFiles, figure_rows, number_at, text_at
from vqclip.runlog.health import (
    CODED,
    LEVELS,
    RECENT,
    Codebook,
    Finding,
    Health,
    HealthSettings,
    Level,
    suggest_remedies,
)

MANY_BAD = 0.1
"""Share of bad samples from which the data counts as ill."""
FEW_BAD = 0.01
"""Share of bad samples that is worth a warning: the default of ``data.max_bad_fraction``."""
UNUSED = 0.05
"""Share of the codes that evenly used codes would show, below which a codebook is hardly used."""
LONG_WAIT = 0.3
"""Share of the time spent waiting for data that is worth a warning."""
_UNKNOWN = HealthSettings(collapse=None, divergence=None, loss="", chance="", codes={})


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run."""

    level: Level
    headline: str
    findings: list[Finding]
    """Worst first."""
    codebooks: list[Codebook]
    """Codebooks of the newest report."""


def judge(run: RunFiles) -> Verdict:
    """Judge a run by its files; its health as the run judged it while it trained, where the run says by what."""
    curves, settings = run.curves, run.about.health if run.about else _UNKNOWN
    collapse, divergence = settings.collapse, settings.divergence
    health = Health(settings)
    for step in sorted({*curves.steps, *curves.evaluations}):
        if step in curves.steps:
            health.add(step, curves.steps[step])
        health.add_evaluation(step, curves.evaluations.get(step, {}))

    kept = [] if collapse is None else [each for each in health.codebooks if not collapse.has_collapsed(each)]
    found = [*_check_finite(run), *health.findings(), *_check_samples(run), *_check_unused(kept), *_check_rest(run)]
    found.sort(key=lambda finding: LEVELS.index(finding.level))
    ill = [finding for finding in found if finding.level in ("bad", "warn")]
    if ill:
        more = f" – and {len(ill) - 1} more" if len(ill) > 1 else ""
        return Verdict(ill[0].level, ill[0].title + more, found, health.codebooks)
    if len(curves.steps) < 2 or run.about is None:
        title = "Too early for a verdict" if run.about else "The health is unknown"
        return Verdict("note", title, found, health.codebooks)
    told = " or ".join(name for name, given in (("collapse", collapse), ("divergence", divergence)) if given)
    title = f"No sign of {told}" if told else "Neither collapse nor divergence is looked for"
    healthy = Finding("good", title, _describe_progress(run, settings, health.codebooks))
    return Verdict("good", "Healthy", [healthy, *found], health.codebooks)


def _describe_progress(run: RunFiles, settings: HealthSettings, codebooks: list[Codebook]) -> str:
    (steps, losses), chance = run.curves.get(settings.loss), settings.chance
    if not losses:
        return ""
    first, last = losses[0], statistics.median(losses[-RECENT:])
    text = f"The loss {'fell' if last < first else 'went'} from {first:.3g} (step {steps[0]:,}) to {last:.3g}"
    text += "." if isinstance(chance, str) else f"; a model that knows nothing has {chance:.3g}."
    shares = [
        f"{_percent(statistics.mean(each.usage for each in found))} of the {modality} codes"
        for modality in CODED
        if (found := [each for each in codebooks if each.modality == modality])
    ]
    return f"{text} In use over the newest tokens: {' and '.join(shares)}." if shares else text


def _check_finite(run: RunFiles) -> Iterator[Finding]:
    """Find a loss or gradient that is not finite."""
    events = [each for each in run.events if each["event"] == "nonfinite"]
    names = [name for name in ("loss/total", "grad_norm") if not math.isfinite(run.curves.latest.get(name, 0.0))]
    if not events and not names:
        return
    newest: dict[str, Any] = events[-1] if events else {}
    since = newest.get("step") or run.curves.last_step
    ended = not run.is_finished and run.done <= since
    advice = (
        "A lower optim.lr (a tenth), a longer optim.warmup_steps, optim.clip_grad_norm: 1; with fp16: train.precision: "
        "bf16. The samples of the step are in events.jsonl."
    )
    text = str(newest.get("reason") or f"{' and '.join(names)}: not finite after step {since:,}")[:500]
    level: Level = "bad" if ended or names or len(events) > 20 else "warn"
    title = f"Diverged at step {since:,}: the loss or the gradient is not finite"
    yield Finding(level, title, f"{text}. {len(events):,} steps of this kind.", advice)


def _check_unused(codebooks: list[Codebook]) -> Iterator[Finding]:
    """Find codebooks that use few codes, among those that have not collapsed."""
    for modality in CODED:
        every = [each for each in codebooks if each.modality == modality]
        few = [each.name for each in every if each.usage < UNUSED * each.usage_if_uniform and each.tokens > 0]
        if few:
            text = f"Less than {_percent(UNUSED)} of what evenly used codes would show: {first_names(few, shown=20)}."
            advice = f"Fewer codes do the same: a smaller codebook. {suggest_remedies(modality)}"
            yield Finding("warn", f"Hardly used: {len(few)} of {len(every)} {modality} codebooks", text, advice)


def _check_samples(run: RunFiles) -> Iterator[Finding]:
    """Find bad samples, replaced by others."""
    latest = run.curves.latest
    replaced = max(latest.get("data/replaced", 0.0), len(run.bad_samples), number_at(run.summary, "replaced") or 0)
    if not math.isfinite(replaced) or replaced < 1:
        return
    known = run.done * run.batch_size
    shown = max(known, replaced)  # those of an unfinished report are not known
    share = replaced / shown if known else math.nan
    prefix = "data/replaced/"
    kinds = {
        name.removeprefix(prefix).replace("_", " "): count
        for name, count in latest.items()
        if name.startswith(prefix) and math.isfinite(count)
    } or Counter(str(each["kind"]) for each in run.bad_samples)
    most = sorted(kinds.items(), key=lambda each: -each[1])[:8]
    named = ", ".join(f"{count:,.0f} × {kind[:80]}" for kind, count in most)
    text = f"{replaced:,.0f} of {shown:,.0f} samples shown are in the place of others that could not be used: {named}."
    advice = "vqclip data check names each one with its reason; mend or remove them. Some are listed below."
    if share >= FEW_BAD:
        level: Level = "bad" if share >= MANY_BAD else "warn"
        yield Finding(level, f"{_percent(share)} of the samples were bad", text, advice)
    else:
        yield Finding("note", f"{replaced:,.0f} bad samples", text, advice)


def _check_rest(run: RunFiles) -> Iterator[Finding]:
    """Find evaluations at chance, waiting for data, steps with an unusually large loss, and captions that were cut."""
    above = [
        max(row.rates.values()) - limit
        for result in run.results
        for row in figure_rows(result)
        if (chance := row.chance) is not None
        and (limit := chance + 3 * math.sqrt(chance * (1 - chance) / max(1, result.samples))) < 1  # can be exceeded
    ]
    if above and max(above) <= 0:
        text = "Every figure of the newest evaluation is that of random embeddings."
        yield Finding("warn", "No better than chance", text, "Train longer, or see the findings above.")
    waits = [value for value in run.curves.get("data_wait")[1] if math.isfinite(value)][-20:]
    if len(waits) >= 3 and (share := statistics.median(waits)) >= LONG_WAIT:
        text = f"{_percent(share)} of the time of the newest reports."
        advice = "More data.workers; smaller stored images; shards on a local disk."
        yield Finding("note", "Much of the time is spent waiting for data", text, advice)
    rates = [rate for rate in run.curves.get("lr")[1] if math.isfinite(rate)]
    falls, highest = text_at(run.config, "optim.schedule") != "constant", number_at(run.config, "optim.lr") or math.inf
    ended = run.stopped or (run.is_finished and run.done < run.steps)
    if falls and ended and rates and rates[-1] > highest / 2:
        text = f"It was {rates[-1]:.2g} at step {run.curves.last_step:,}, of at most {highest:.2g}."
        advice = "The last steps, in which it falls, give much of the quality: resume the run to its end."
        yield Finding("warn", "The learning rate never came down", text, advice)
    if spikes := [each["step"] for each in run.events if each["event"] == "spike"]:
        text = f"First at step {spikes[0]:,}; the samples of each are in events.jsonl."
        yield Finding("note", f"{len(spikes):,} steps with an unusually large loss", text)
    shown, cut = number_at(run.summary, "captions.shown") or 0, number_at(run.summary, "captions.cut") or 0
    if shown > 0 and cut / shown >= 0.05:
        title = f"{_percent(cut / shown)} of the captions were cut"
        yield Finding("note", title, text_at(run.summary, "captions.told")[:500])


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
