"""Health of a run, judged from its metrics: a dead model, collapsed codebooks, divergence.

    health = Health(settings)
    for step, figures in rows:  health.add(step, figures)     new warnings, in words; `add_evaluation` does the same
    health.findings()                                         what is wrong after the last row
    health.summary()                                          the same for summary.json, with all warnings

The rows are those of ``metrics.jsonl``. A run adds each report; when it resumes, it first adds the rows in the file.
Its page adds the rows in the file, too, with the settings in ``about.json``. So the run and its page say the same, and
checkpoints hold no state of it. A row that is only there because the run was stopped is not judged: a run that was
never stopped has none.

The run warns once of each sign, when it has lasted:

| kind | sign | lasts |
|---|---|---|
| dead | the gradient is 0; all embeddings of a batch are equal | `collapse.steps`, three rows |
| dead | the loss is that of a model that knows nothing | `collapse.steps`, three rows |
| collapsed | the perplexity of a codebook is far below that of evenly used codes | `collapse.steps` |
| diverged | the loss has lost much of what it had gained, or is above that of a dead model | `divergence.steps` |
| diverged | the gradient norm is far above the usual one | - |
| overfitted | the loss is nearly the lowest, and figures of held-out data have not risen in two evaluations | - |

A batch of one class has the signs of a dead model: so three rows. A run of fewer is dead if all its rows are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from vqclip.config import Config
from vqclip.io.json_files import Strict
from vqclip.io.tensors import first_names

CODED = ("image", "text", "detail")
"""Names under which quantizers are in the metrics."""
HEALTHY = "no sign of collapse"
"""Verdict on a run without signs."""
RECENT = 5
"""Reports whose median counts as the present loss or gradient norm, so that a single spike is no divergence."""
USUAL = 100
"""Reports before those, whose median is the usual gradient norm; at least a tenth of them is needed."""
_DEAD_ROWS = 3
"""Rows that the signs of a dead model must last before the warning."""
_MAX_WARNINGS = 1000
"""Warnings that a summary has; older ones are in the log."""
_LEARNT, _GOOD = 0.02, 0.9
"""Loss, as a fraction of the way from the lowest to that of a model that knows nothing, below which the training data
are learnt; mean rate of held-out data from which a model is not called overfitted."""
_RESTART = (
    "Such weights rarely recover: start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or "
    "resume from an earlier checkpoint."
)
_LOWER_RATE = (
    "Stop it and start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or resume it from a "
    "checkpoint of before, with a lower optim.lr and run.resume_allow=[optim]."
)
_FEWER_STEPS = (
    "What may help: more data, fewer train.steps, a stronger data.transform; train.keep_best with train.export: best "
    "exports the best step."
)
_HELD_OUT = {"R@1": ("/quantized/i2t_r1", "/quantized/t2i_r1"), "top-1": ("/quantized/top1",)}
"""Figures by whose mean an evaluation counts: the first that there are."""

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


def read_codebooks(figures: Mapping[str, float], codes: Mapping[str, int]) -> list[Codebook]:
    """Return the codebooks whose metrics are complete and possible.

    Args:
        figures: metrics of a step.
        codes: K of each codebook, by modality; 0 if unknown.
    """
    found = []
    for modality, size in codes.items():
        for name in codebook_names(figures, modality):
            above = name
            while above and f"{above}/usage_if_uniform" not in figures:
                above = above.rpartition("/")[0]
            keys = f"{modality}/tokens", f"{above}/usage_if_uniform", f"{name}/usage", f"{name}/perplexity"
            numbers = [figures.get(key, -1.0) for key in keys]
            if all(0 <= number < 2**53 for number in numbers):
                found.append(Codebook(name, size, *numbers))
    return found


class CollapseConfig(Config):
    """Thresholds for a collapsed run or codebook."""

    usage: float = Field(0.005, gt=0, le=1)
    """A codebook has collapsed if its perplexity is below this fraction of the codes that the same number of tokens
    would use if all codes were equally likely; also if nearly all its tokens have one code."""
    steps: int = Field(20, ge=1)
    """Steps for which a codebook uses too few codes, or, in three reports at least, the loss is at chance, the gradient
    is 0 or all embeddings are equal, before the warning."""

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


class HealthSettings(Strict):
    """Settings by which the rows of a run are judged."""

    collapse: CollapseConfig | None
    """Thresholds of dead runs and collapsed codebooks; None: they are not looked for."""
    divergence: DivergenceConfig | None
    """Thresholds of runs that diverge; None: they are not looked for."""
    loss: str
    """Metric by which progress is judged: the contrastive loss, or the error of decoded images."""
    chance: float | str
    """Its value for a model that knows nothing, or the metric that has it."""
    lowest: float = 0.0
    """Its lowest value: with label smoothing more than 0."""
    codes: dict[str, Annotated[int, Field(ge=1, le=2**64)]]
    """K of each codebook, by modality; codebooks of others are not judged."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps, in which the loss may be at chance or rise."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between reports; rows of other steps are those of a stop and change nothing."""
    end: Annotated[int, Field(ge=0)] = 0
    """Last step of the run, whose row counts whatever `every` is."""


@dataclass(frozen=True)
class Finding:
    """One observation about a run, in sentences."""

    level: Level
    title: str
    """Observation in a few words."""
    text: str = ""
    """Observation in figures."""
    advice: str = ""


@dataclass(frozen=True)
class _Sign:
    """Something that is wrong with a row."""

    title: str
    """Title of the finding, with ``{}`` for the step since when."""
    text: str
    advice: str
    wait: int = 0
    """Steps that it must last before the warning."""
    rows: int = 1
    """Rows that it must last before the warning."""
    at_once: bool = False
    """Whether the verdict has it before it has lasted."""
    codebooks: tuple[str, ...] = ()
    """Names of those that it is of; each must last, and is warned of once."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the things that are wrong, equal in all rows that have them."""
        return self.codebooks or (self.title,)


class Health:
    """Health of a run, judged from its rows, one after the other.

    Attributes:
        codebooks: codebooks of the last row that was judged.
        warnings: ``step`` and ``text`` of the newest warnings.
    """

    def __init__(self, settings: HealthSettings):
        self._settings, self._collapse, self._divergence = settings, settings.collapse, settings.divergence
        self._step = self._rows = 0
        self.codebooks: list[Codebook] = []
        self.warnings: deque[dict[str, Any]] = deque(maxlen=_MAX_WARNINGS)
        self._signs: list[_Sign] = []
        """Signs of the last row."""
        self._began: dict[str, tuple[int, int, int]] = {}
        """Key of a sign → the row before the newest ones that all have it (0 without one), and the first and number of
        these."""
        self._overfitted: Finding | None = None
        self._told: set[str] = set()
        """Keys of signs that the run has warned of."""
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=RECENT + USUAL)
        self._lowest, self._lowest_at = math.inf, 0
        """Lowest median of the losses, and its step."""
        self._share = math.nan
        """Median of the losses, as a fraction of the way from the lowest to that of a model that knows nothing."""
        self._rates: dict[int, float] = {}
        """Step → mean rate of held-out data."""

    def add(self, step: int, figures: Mapping[str, float]) -> list[str]:
        """Judge a row, and return the new warnings; none for the row of a stop."""
        settings = self._settings
        if step % settings.every and step != settings.end:
            return []
        loss, chance = figures.get(settings.loss, math.nan), settings.chance
        chance = figures.get(chance, math.nan) if isinstance(chance, str) else chance
        is_warm, found = step > settings.warmup_steps, list[_Sign]()
        self.codebooks = read_codebooks(figures, settings.codes)
        if self._collapse is not None:
            found += _find_dead(self._collapse, figures, loss if is_warm else math.nan, chance)
            found += _find_collapsed(self._collapse, self.codebooks)
        is_open = figures.get("bottleneck/share", 1.0) < 1  # codes replace the continuous vectors step by step
        if self._divergence is not None and is_warm and not is_open:
            found += self._find_rise(self._divergence, step, loss, chance)
            found += self._find_explosion(self._divergence, figures.get("grad_norm", math.nan))
        new, self._step, self._signs, self._rows = (self._step, step, 0), step, found, self._rows + 1
        began = {key: self._began.get(key, new) for sign in found for key in sign.keys}
        self._began = {key: (before, first, rows + 1) for key, (before, first, rows) in began.items()}
        lasting = [(sign, keys) for sign in found if (keys := self._lasting(sign, sign.rows))]
        return [text for sign, keys in lasting for text in self._warn(keys, self._find(sign))]

    def _lasting(self, sign: _Sign, rows: int) -> list[str]:
        """Return the keys of a sign of the last row that have lasted, in this number of rows or more."""
        began = {key: self._began[key] for key in sign.keys}
        return [key for key, (before, _, n) in began.items() if self._step - before >= sign.wait and n >= rows]

    def _find(self, sign: _Sign) -> Finding:
        since = min(self._began[key][1] for key in sign.keys)
        return Finding("bad", sign.title.format(f"{since:,}"), sign.text, sign.advice)

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
        self._overfitted = None
        if not (self._share < _LEARNT and later > 1 and step - since > step / 4 and best < _GOOD):
            return []
        text = (
            f"The loss on training batches is {statistics.median(self._losses):.3g}, and {title} of held-out data has "
            f"not risen since then ({best:.1%})."
        )
        self._overfitted = Finding("warn", f"Overfitted since step {since:,}", text, _FEWER_STEPS)
        return self._warn(["Overfitted"], self._overfitted, step)

    def _warn(self, keys: Sequence[str], finding: Finding, step: int | None = None) -> list[str]:
        """Return and record a warning, unless the run has warned of all these before."""
        if self._told.issuperset(keys):
            return []
        self._told.update(keys)
        text = f"{finding.title}. {finding.text} {finding.advice}"
        self.warnings.append({"step": self._step if step is None else step, "text": text})
        return [text]

    def findings(self) -> list[Finding]:
        """Return what is wrong after the last row.

        A codebook that has collapsed in the last row counts at once: the next row may never come.
        """
        lasting = [
            s for s in self._signs if self._lasting(s, min(s.rows, self._rows)) or (s.at_once and self._step >= s.wait)
        ]
        return [*map(self._find, lasting), *([] if self._overfitted is None else [self._overfitted])]

    def summary(self) -> dict[str, Any]:
        """Return the verdict after the last row, as JSON values; empty if nothing is looked for.

        ``verdict`` is a line of text, ``codebooks`` their usage over the window, ``warnings`` those of the whole run.
        """
        if self._collapse is None and self._divergence is None:
            return {}
        verdict = " ".join(f"{finding.title}. {finding.text}" for finding in self.findings())
        codebooks = [asdict(each) for each in self.codebooks]
        return {"verdict": verdict or HEALTHY, "codebooks": codebooks, "warnings": list(self.warnings)}

    def _find_rise(self, config: DivergenceConfig, step: int, loss: float, chance: float) -> Iterator[_Sign]:
        """Find a loss that has been too high for long. Losses that are not finite are left out; guards report those."""
        self._losses += [loss] if math.isfinite(loss) else []
        if len(self._losses) < RECENT or not chance:  # 0 in batches of one sample
            return
        now = statistics.median(self._losses)
        lowest = self._settings.lowest
        self._share = (now - lowest) / max(chance - lowest, 1e-12)
        if now < self._lowest:
            self._lowest, self._lowest_at = now, step
        gained = chance - self._lowest
        has_learned = gained > 0.2 * chance  # what is lost of less may be noise
        if (has_learned and now > self._lowest + config.lost * gained) or now > 1.05 * chance:
            best = (
                f"{self._lowest:.3f} at step {self._lowest_at:,}" if has_learned else f"never below {self._lowest:.3f}"
            )
            text = f"It is {now:.3f} now; it was {best}, and a model that knows nothing has {chance:.3f}."
            yield _Sign("Diverged since step {}: the loss is too high", text, _LOWER_RATE, config.steps)

    def _find_explosion(self, config: DivergenceConfig, norm: float) -> Iterator[_Sign]:
        """Find gradients that have become far larger than usual."""
        self._norms += [norm] if math.isfinite(norm) else []
        before, recent = [*self._norms][:-RECENT], [*self._norms][-RECENT:]
        if len(before) < USUAL // 10:
            return
        usual, now = statistics.median(before), statistics.median(recent)
        if now > config.gradient * max(usual, 1e-12):
            text = f"Its norm is {now:.3g}, where {usual:.3g} was usual."
            yield _Sign("Diverged since step {}: the gradient explodes", text, _LOWER_RATE)


def _find_dead(config: CollapseConfig, figures: Mapping[str, float], loss: float, chance: float) -> Iterator[_Sign]:
    """Find signs of a model that no longer learns."""
    if figures.get("grad_norm", math.inf) < 1e-12:
        title = "Dead since step {}: the gradient is 0"
        yield _Sign(title, "The model no longer learns.", _RESTART, config.steps, _DEAD_ROWS)
    for modality in CODED:
        if figures.get(f"{modality}/embedding_cosine", 0.0) > 1 - 1e-5:
            title = f"Dead since step {{}}: all {modality} embeddings of a batch are equal"
            text = "The model no longer learns, or all its inputs are equal."
            yield _Sign(title, text, _RESTART, config.steps, _DEAD_ROWS)
    if abs(loss - chance) <= 1e-3 * chance:
        text = f"It is {loss:.4f}, that of a model that knows nothing ({chance:.4f})."
        yield _Sign("Dead since step {}: the loss is at chance", text, _RESTART, config.steps, _DEAD_ROWS)


def _find_collapsed(config: CollapseConfig, codebooks: Sequence[Codebook]) -> Iterator[_Sign]:
    """Find codebooks that use too few codes: one sign for each modality."""
    for modality in CODED:
        every = [each for each in codebooks if each.modality == modality]
        lost = [each for each in every if config.has_collapsed(each)]
        if not lost:
            continue
        used, perplexity = (_span([getattr(each, name) for each in lost]) for name in ("used", "perplexity"))
        which = f"{len(lost)} of {len(every)} codebooks ({first_names([each.number for each in lost], shown=20)}): "
        text = (
            f"{which if lost[0].number else ''}{used} of {lost[0].codes:,} codes in use over {lost[0].tokens:,.0f} "
            f"tokens, where evenly used codes would be {lost[0].possible:,.0f}; perplexity {perplexity}."
        )
        title = f"Collapsed since step {{}}: {modality} codebooks"
        names = tuple(each.name for each in lost)
        yield _Sign(title, text, suggest_remedies(modality), config.steps, at_once=True, codebooks=names)


def suggest_remedies(modality: str) -> str:
    """Return advice for codebooks of a modality that use few codes."""
    normalize = "" if modality == "detail" else f"model.{modality}.normalize: layer before the quantizer, "
    return (
        f"What may help: {normalize}a lower optim.lr or a longer "
        "optim.warmup_steps; for vq dead_below > 0; for lfq and bsq a larger weight of codebook_entropy_gap or a "
        "higher entropy_temperature; several smaller codebooks (kind: product)."
    )


def _span(numbers: Sequence[float]) -> str:
    """Return the lowest and the highest number as text: ``3 to 7``, or ``3``."""
    return " to ".join(dict.fromkeys(f"{each(numbers):,.0f}" for each in (min, max)))
