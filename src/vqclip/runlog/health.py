"""Health of a run, judged from its metrics: a dead model, collapsed codebooks, divergence.

    health = Health(collapse, divergence, loss, chance, codes, warmup_steps, every)
    for step, figures in rows:  health.add(step, figures)     new warnings, in words; `add_evaluation` does the same
    health.findings()                                         what is wrong after the last row
    health.summary()                                          the same for summary.json, with all warnings

The rows are those of ``metrics.jsonl``. A run adds each report; when it resumes, it first adds the rows in the file.
Its page adds the rows in the file, too. So the run and its page say the same, and checkpoints hold no state of it. A
row that is only there because the run was stopped is not judged: a run that was never stopped has none.

The run warns of a sign when it has lasted, and again only after it was absent for long:

| kind | sign | lasts |
|---|---|---|
| dead | the gradient is 0; all embeddings of a batch are equal | - |
| dead | the loss is that of a model that knows nothing | `collapse.steps` |
| collapsed | the perplexity of a codebook is far below that of evenly used codes | `collapse.steps`, or rare reports |
| diverged | the loss has lost much of what it had gained, or is above that of a dead model | `divergence.steps` |
| diverged | the gradient norm is far above the usual one | - |
| overfitted | the loss is nearly 0, and figures of held-out data have not risen in two evaluations | - |
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field

from vqclip.config import Config
from vqclip.io.tensors import first_names

CODED = ("image", "text", "detail")
"""Names under which quantizers are in the metrics."""
HEALTHY = "no sign of collapse"
"""Verdict on a run without signs."""
RECENT = 5
"""Reports whose median counts as the present loss or gradient norm, so that a single spike is no divergence."""
USUAL = 100
"""Reports before those, whose median is the usual gradient norm; at least a tenth of them is needed."""
_MAX_WARNINGS = 1000
"""Warnings that a summary has; older ones are in the log."""
_LEARNT, _GOOD = 0.02, 0.9
"""Loss, as a fraction of that of a model that knows nothing, below which the training data are learnt; mean rate of
held-out data from which a model is not called overfitted."""
_PAUSES = 3
"""Absence of a sign, in multiples of `CollapseConfig.steps`, after which it is new again; divergence never is."""
_RESTART = (
    "Such weights rarely recover: start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or "
    "resume from an earlier checkpoint"
)
_LOWER_RATE = (
    "Stop it and start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or resume it from a "
    "checkpoint of before, with a lower optim.lr and run.resume_allow=[optim]"
)

_FEWER_STEPS = (
    "What may help: more data, fewer train.steps, a stronger data.transform; train.keep_best with train.export: best "
    "exports the best step"
)
_HELD_OUT = {"R@1": ("/quantized/i2t_r1", "/quantized/t2i_r1"), "top-1": ("/quantized/top1",)}
"""Figures by whose mean an evaluation counts: the first that there are."""

Kind = Literal["dead", "collapsed", "diverged", "overfitted"]
"""Kind of sign, by what is wrong with the run."""
Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
"""From worst to best."""


@dataclass(frozen=True)
class Codebook:
    """Usage of a codebook over a window of tokens, from the metrics of a step."""

    name: str
    """Name as in the metrics: ``image``; ``image/3`` of several; ``image/0/3`` of several of a stage."""
    codes: int
    """K; 0 if unknown."""
    tokens: float
    usage_if_uniform: float
    """Share of the codes that as many tokens would use if all codes were equally likely."""
    usage: float
    """Share of the codes in use."""
    perplexity: float

    @property
    def modality(self) -> str:
        """One of `CODED`."""
        return self.name.partition("/")[0]

    @property
    def number(self) -> str:
        """Number among the codebooks of its modality, such as ``3`` or ``0/3``; empty for the only one."""
        return self.name.partition("/")[2]

    @property
    def used(self) -> float:
        """Number of codes in use."""
        return self.usage * self.codes

    @property
    def possible(self) -> float:
        """Number of codes that evenly used ones would show."""
        return self.usage_if_uniform * self.codes

    @property
    def share(self) -> float:
        """Codes in use, as a fraction of those that evenly used ones would show; 0..1."""
        return min(self.usage / max(self.usage_if_uniform, 1e-12), 1.0)


def codebook_names(figures: Mapping[str, float], modality: str) -> list[str]:
    """Return the names of a modality's codebooks in the metrics of a step.

    A stage that has codebooks of its own is left out: its metrics are their means.
    """
    prefix = f"{modality}/"
    names = [name.removesuffix("/usage") for name in figures if name.startswith(prefix) and name.endswith("/usage")]
    stages = {name.rpartition("/")[0] for name in names}
    return [name for name in names if name not in stages]


def read_codebooks(modality: str, figures: Mapping[str, float], codes: int = 0) -> list[Codebook]:
    """Return the codebooks of a modality whose metrics are complete and possible.

    Args:
        modality: one of `CODED`.
        figures: metrics of a step.
        codes: K of each codebook; 0 if unknown.
    """
    found = []
    tokens = figures.get(f"{modality}/tokens", -1.0)
    for name in codebook_names(figures, modality):
        above = name
        while above and f"{above}/usage_if_uniform" not in figures:
            above = above.rpartition("/")[0]
        possible, perplexity = figures.get(f"{above}/usage_if_uniform", -1.0), figures.get(f"{name}/perplexity", -1.0)
        numbers = tokens, possible, figures[f"{name}/usage"], perplexity
        if all(0 <= number < 2**53 for number in numbers):
            found.append(Codebook(name, codes, *numbers))
    return found


def least_used(figures: Mapping[str, float]) -> Codebook | None:
    """Return the codebook that uses the smallest share of the codes it could; None if there is none."""
    every = [each for modality in CODED for each in read_codebooks(modality, figures)]
    return min(every, key=lambda each: each.share, default=None)


class CollapseConfig(Config):
    """Thresholds for a collapsed run or codebook."""

    usage: float = Field(0.005, gt=0, le=1)
    """A codebook has collapsed if its perplexity is below this fraction of the codes that the same number of tokens
    would use if all codes were equally likely; also if nearly all its tokens have one code."""
    steps: int = Field(20, ge=1)
    """Steps for which a codebook uses too few codes, or the loss is at chance, before the warning; a gradient of 0 and
    equal embeddings are reported at once."""

    def has_collapsed(self, codebook: Codebook) -> bool:
        """Return whether a codebook uses too few of its codes.

        Perplexity decides, not the number of codes seen, which a few stray tokens in a long window keep above any
        limit.
        """
        if codebook.possible < min(10, 0.9 * codebook.codes):  # too few tokens
            return False
        return codebook.perplexity < max(1.05, self.usage * codebook.possible)


class DivergenceConfig(Config):
    """Thresholds for a run that diverges."""

    lost: float = Field(0.5, gt=0)
    """The contrastive loss has diverged if it has lost more than this fraction of what it had gained, from the loss of
    a model that knows nothing to the lowest loss so far; also if it is higher than the former by a twentieth."""
    gradient: float = Field(100.0, gt=1)
    """The gradient explodes if its norm is more than this many times the usual one."""
    steps: int = Field(100, ge=1)
    """Steps for which the loss is too high before the warning; an exploding gradient is reported at once."""


@dataclass(frozen=True)
class Finding:
    """One observation about a run."""

    level: Level
    title: str
    """Observation in a few words."""
    text: str = ""
    """Observation in figures."""
    advice: str = ""
    kind: Kind | None = None
    """Kind of the signs behind it; None for other findings."""


@dataclass
class _Sign:
    """Something that is wrong with a run, or was."""

    kind: Kind
    name: str
    """``loss``, ``gradient``, ``image embeddings``, ...; of a collapsed codebook its name."""
    text: str
    """Observation in figures; empty for a codebook."""
    since: int
    """First step of the newest rows that all have it."""
    last: int
    """Newest row that has it."""
    due: bool = False
    """Whether it has lasted long enough."""
    told: bool = False
    """Whether the run has warned of it."""


class Health:
    """Health of a run, judged from its rows, one after the other.

    Args:
        collapse: thresholds of dead runs and collapsed codebooks; None: they are not looked for.
        divergence: thresholds of runs that diverge; None: they are not looked for.
        loss: metric by which progress is judged: the contrastive loss, or the error of decoded images.
        chance: its value for a model that knows nothing, or the metric that has it; NaN if unknown.
        codes: K of each codebook, by modality; codebooks of others are not judged.
        warmup_steps: first steps, in which the loss may be at chance or rise.
        every: steps between reports; rows of other steps are those of a stop and change nothing.
        end: last step of the run, whose row counts whatever ``every`` is.

    Attributes:
        codebooks: codebooks of the last row that was judged.
        warnings: ``step`` and ``text`` of the newest warnings.
    """

    def __init__(
        self,
        collapse: CollapseConfig | None,
        divergence: DivergenceConfig | None,
        loss: str,
        chance: float | str,
        codes: Mapping[str, int],
        warmup_steps: int = 0,
        every: int = 1,
        end: int = 0,
    ):
        self._collapse, self._divergence = collapse, divergence
        self._loss, self._chance, self._codes, self._warmup_steps = loss, chance, codes, warmup_steps
        self._every, self._end = every, end
        self.codebooks: list[Codebook] = []
        self.warnings: deque[dict[str, Any]] = deque(maxlen=_MAX_WARNINGS)
        self._step = self._before = 0
        """Steps of the last row and of the one before; 0 without one."""
        self._signs: dict[tuple[Kind, str], _Sign] = {}
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=RECENT + USUAL)
        self._lowest, self._lowest_at = math.inf, 0
        """Lowest median of the losses, and its step."""
        self._share = math.nan
        """Median of the losses, as a fraction of that of a model that knows nothing."""
        self._rates: dict[int, float] = {}
        """Step → mean rate of held-out data."""
        self._overfitted: Finding | None = None

    def add(self, step: int, figures: Mapping[str, float]) -> list[str]:
        """Judge a row, and return the new warnings; none for the row of a stop."""
        if step % self._every and step != self._end:
            return []
        self._before, self._step = self._step, step
        loss, chance = figures.get(self._loss, math.nan), self._chance
        chance = figures.get(chance, math.nan) if isinstance(chance, str) else chance
        is_warm, found = step > self._warmup_steps, list[_Sign]()
        self.codebooks = [each for name, k in self._codes.items() for each in read_codebooks(name, figures, k)]
        if self._collapse is not None:
            found += self._find_dead(self._collapse, figures, loss if is_warm else math.nan, chance)
            steps = self._collapse.steps
            wait = 0 if step - self._before >= steps else steps  # 0: reports are rare
            lost = [each.name for each in self.codebooks if self._collapse.has_collapsed(each)]
            found += [self._sign("collapsed", name, wait) for name in lost]
        is_open = figures.get("bottleneck/share", 1.0) < 1  # codes replace the continuous vectors step by step
        if self._divergence is not None and is_warm and not is_open:
            found += self._find_rise(self._divergence, loss, chance)
            found += self._find_explosion(self._divergence, figures.get("grad_norm", math.nan))
        self._signs |= {(sign.kind, sign.name): sign for sign in found}

        new = [sign for sign in found if sign.due and not sign.told]
        for sign in new:
            sign.told = True
        messages = [f"{finding.text}. {finding.advice}" for finding in self._describe(new)]
        self.warnings += [{"step": step, "text": each} for each in messages]
        return messages

    def findings(self) -> list[Finding]:
        """Return what is wrong after the last row.

        A codebook that has collapsed in the last row counts at once: the next row may never come.
        """
        at_once = self._collapse is not None and self._step >= self._collapse.steps
        present = [sign for sign in self._signs.values() if sign.last == self._step]
        found = self._describe([sign for sign in present if sign.due or (sign.kind == "collapsed" and at_once)])
        return found if self._overfitted is None else [*found, self._overfitted]

    def add_evaluation(self, step: int, rates: Mapping[str, float]) -> list[str]:
        """Judge an evaluation, and return the new warnings.

        Args:
            step: steps done.
            rates: ``task/mode/figure`` → rate, and other figures.
        """
        every = {title: [rate for name, rate in rates.items() if name.endswith(of)] for title, of in _HELD_OUT.items()}
        title = next((title for title, found in every.items() if found), None)
        if title is None or self._divergence is None:
            return []
        self._rates[step] = statistics.mean(every[title])
        best = max(self._rates.values())
        since = min(each for each, rate in self._rates.items() if rate == best)
        later = sum(each > since for each in self._rates)
        former, self._overfitted = self._overfitted, None
        if not (self._share < _LEARNT and later > 1 and step - since > step / 4 and best < _GOOD):
            return []
        loss = statistics.median(self._losses)
        text = (
            f"the loss on training batches is {loss:.3g}, and {title} of held-out data has not risen since step "
            f"{since:,} ({best:.1%})"
        )
        self._overfitted = Finding("warn", f"Overfitted since step {since:,}", text, _FEWER_STEPS, "overfitted")
        messages = [] if former is not None else [f"{text}. {_FEWER_STEPS}"]
        self.warnings += [{"step": step, "text": each} for each in messages]
        return messages

    def summary(self) -> dict[str, Any]:
        """Return the verdict after the last row, as JSON values; empty if nothing is looked for.

        ``verdict`` is a line of text, ``codebooks`` their usage over the window, ``warnings`` those of the whole run.
        """
        if self._collapse is None and self._divergence is None:
            return {}
        verdict = "; ".join(f"{str(finding.kind).upper()}: {finding.text}" for finding in self.findings())
        codebooks = [asdict(each) for each in self.codebooks]
        return {"verdict": verdict or HEALTHY, "codebooks": codebooks, "warnings": list(self.warnings)}

    def _sign(self, kind: Kind, name: str, wait: int, text: str = "") -> _Sign:
        """Return a sign of this row, which is due when it has lasted ``wait`` steps, and then stays so."""
        sign, former = _Sign(kind, name, text, self._step, self._step), self._signs.get((kind, name))
        if former is not None:
            lasts = former.last == self._before
            if lasts:
                sign.since, sign.due = former.since, former.due
            pause = math.inf if kind == "diverged" or self._collapse is None else _PAUSES * self._collapse.steps
            sign.told = former.told and (lasts or self._step - former.last < pause)
        sign.due |= self._step - sign.since >= wait
        return sign

    def _find_dead(
        self, config: CollapseConfig, figures: Mapping[str, float], loss: float, chance: float
    ) -> Iterator[_Sign]:
        """Find signs of a model that no longer learns."""
        if figures.get("grad_norm", math.inf) < 1e-12:
            yield self._sign("dead", "gradient", 0, "the gradient is 0, so the model no longer learns")
        for modality in CODED:
            if figures.get(f"{modality}/embedding_cosine", 0.0) > 1 - 1e-5:
                text = f"all {modality} embeddings of a batch are equal"
                yield self._sign("dead", f"{modality} embeddings", 0, text)
        if abs(loss - chance) <= 1e-3 * chance:
            covers_start = not self._before and self._step >= config.steps  # a first report this late
            text = f"the loss is {loss:.4f}, that of a model that knows nothing ({chance:.4f})"
            yield self._sign("dead", "loss", 0 if covers_start else config.steps, text)

    def _find_rise(self, config: DivergenceConfig, loss: float, chance: float) -> list[_Sign]:
        """Find a loss that has been too high for long. Losses that are not finite are left out; guards report those."""
        self._losses += [loss] if math.isfinite(loss) else []
        if len(self._losses) < RECENT:
            return []
        now = statistics.median(self._losses)
        self._share = now / chance
        if now < self._lowest:
            self._lowest, self._lowest_at = now, self._step
        gained = chance - self._lowest
        has_learned = gained > 0.2 * chance  # what is lost of less may be noise
        is_lost = has_learned and now > self._lowest + config.lost * gained
        if not (is_lost or now > 1.05 * chance):
            return []
        sign = self._sign("diverged", "loss", config.steps)
        best = f"{self._lowest:.3f} at step {self._lowest_at}" if has_learned else f"never below {self._lowest:.3f}"
        sign.text = (
            f"the run diverges: the loss has been too high since step {sign.since} and is "
            f"{now:.3f} now; it was {best}, and a model that knows nothing has {chance:.3f}"
        )
        return [sign]

    def _find_explosion(self, config: DivergenceConfig, norm: float) -> list[_Sign]:
        """Find gradients that have become far larger than usual."""
        self._norms += [norm] if math.isfinite(norm) else []
        norms = list(self._norms)
        before, recent = norms[:-RECENT], norms[-RECENT:]
        if len(before) < USUAL // 10:
            return []
        usual, now = statistics.median(before), statistics.median(recent)
        if now <= config.gradient * max(usual, 1e-12):
            return []
        text = f"the run diverges: the gradient norm is {now:.3g}, where {usual:.3g} was usual"
        return [self._sign("diverged", "gradient", 0, text)]

    def _describe(self, signs: Sequence[_Sign]) -> list[Finding]:
        """Return the findings of signs: one for all of a dead model, one for each modality, one for each divergence."""
        found = []
        if dead := [sign for sign in signs if sign.kind == "dead"]:
            title = f"Dead since step {min(sign.since for sign in dead):,}: the model no longer learns"
            found.append(Finding("bad", title, "; ".join(sign.text for sign in dead), _RESTART, "dead"))
        since = {sign.name: sign.since for sign in signs if sign.kind == "collapsed"}
        for modality in self._codes:
            every = [each for each in self.codebooks if each.modality == modality]
            if lost := [each for each in every if each.name in since]:
                found.append(_describe_collapse(modality, lost, len(every), min(since[each.name] for each in lost)))
        for sign in signs:
            if sign.kind == "diverged":
                title = "Diverged: the loss is too high" if sign.name == "loss" else "Diverged: the gradient explodes"
                found.append(Finding("bad", title, sign.text, _LOWER_RATE, "diverged"))
        return found


def _describe_collapse(modality: str, lost: Sequence[Codebook], every: int, since: int) -> Finding:
    """Describe the collapsed ones of the codebooks of a modality."""
    first, few = lost[0], len(lost) == 1
    which = f"{len(lost)} of {every} {modality} codebooks"
    which = which if every > 1 else f"the {modality} codebook has few codes left"
    numbers = first_names([each.number for each in lost], shown=20)
    named = f"codebook{'' if few else 's'} {numbers} of {every}" if first.number else "the codebook"
    used, perplexity = ([getattr(each, name) for each in lost] for name in ("used", "perplexity"))
    text = (
        f"{modality}: {named} {'has' if few else 'have'} collapsed since step {since} or before: {_span(used)} of "
        f"{first.codes:,} codes in use over {first.tokens:,.0f} tokens, where evenly used codes would be "
        f"{first.possible:,.0f}; perplexity {_span(perplexity)}"
    )
    return Finding("bad", f"Collapsed since step {since:,}: {which}", text, suggest_remedies(modality), "collapsed")


def suggest_remedies(modality: str) -> str:
    """Return advice for codebooks of a modality that use few codes."""
    normalize = "" if modality == "detail" else f"model.{modality}.normalize: layer before the quantizer, "
    return (
        f"What may help: {normalize}a lower optim.lr or a longer "
        "optim.warmup_steps; for vq dead_below > 0; for lfq and bsq a larger weight of codebook_entropy_gap or a "
        "higher entropy_temperature; several smaller codebooks (kind: product)"
    )


def _span(numbers: Sequence[float]) -> str:
    """Return the lowest and the highest number as text: ``3 to 7``, or ``3``."""
    return " to ".join(dict.fromkeys(f"{each(numbers):,.0f}" for each in (min, max)))
