"""Health of a run: signs that it no longer learns, that codebooks have collapsed, or that it diverges.

    health = Health(collapse, divergence)
    for each report:  health.add(step, figures, loss, chance, ...)    new warnings, in words
    health.summary()                                                  verdict, codebooks, warnings

A run adds the metrics of each report, and its checkpoints hold the state. Its page adds those in ``metrics.jsonl``.

The run warns of a sign when it has lasted, and again only after it was absent for long:

| kind | sign | lasts |
|---|---|---|
| dead | the gradient is 0; all embeddings of a batch are equal | - |
| dead | the loss is that of a model that knows nothing | `collapse.steps` |
| collapsed | the perplexity of a codebook is far below that of evenly used codes | `collapse.steps`, or rare reports |
| diverged | the loss has lost much of what it had gained, or is above that of a dead model | `divergence.steps` |
| diverged | the gradient norm is far above the usual one | - |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from vqclip.config import Config
from vqclip.io.json_files import Strict
from vqclip.io.tensors import first_names
from vqclip.runlog.codebooks import MODALITIES, Codebook, modality_of, read_codebooks

HEALTHY = "no sign of collapse"
"""Verdict on a run without signs."""
MAX_WARNINGS = 1000
"""Warnings that a run keeps; older ones are in its log."""
RECENT = 5
"""Reports whose median counts as the present loss or gradient norm, so that a single spike is no divergence."""
USUAL = 100
"""Reports before those, whose median is the usual gradient norm; at least a tenth of them is needed."""
_PAUSES = 3
"""Absence of a sign, in multiples of `CollapseConfig.steps`, after which it is new again; divergence never is."""

RESTART = (
    "Such weights rarely recover: start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or "
    "resume from an earlier checkpoint"
)
"""Advice for a run that no longer learns."""
REMEDY = (
    "Stop it and start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or resume it from a "
    "checkpoint of before, with a lower optim.lr and run.resume_allow=[optim]"
)
"""Advice for a run that diverges."""


def suggest_remedies(modality: str) -> str:
    """Return advice for collapsed codebooks of a modality."""
    return (
        f"What may help: model.{modality}.normalize: layer before the quantizer, a lower optim.lr or a longer "
        "optim.warmup_steps; for vq dead_below > 0; for lfq and bsq a larger weight of codebook_entropy_gap or a "
        "higher entropy_temperature; several smaller codebooks (kind: product)"
    )


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


Kind = Literal["dead", "collapsed", "diverged"]
"""Kind of sign, by what is wrong with the run."""
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class Sign(Strict):
    """Something that is wrong with a run, or was."""

    model_config = ConfigDict(frozen=False)

    kind: Kind
    name: str
    """``loss``, ``gradient``, ``image embeddings``, ...; of a collapsed codebook its name."""
    since: _Count
    """First step of the newest reports that all have it."""
    due: bool
    """Whether it has lasted long enough."""
    text: Annotated[str, Field(max_length=1000)]
    """Observation in figures; empty for a codebook, see `Health.describe`."""
    present: bool = True
    """Whether the last report has it."""
    told: _Count | None = None
    """Last step at which it was due; None if it never was."""


class _Warning(Strict):
    step: _Count
    text: Annotated[str, Field(max_length=10_000)]


class _State(Strict):
    """Everything that decides what comes next; in checkpoints."""

    model_config = ConfigDict(frozen=False)

    last: _Count = 0
    """Step of the last report; 0 before the first."""
    signs: list[Sign] = []
    """Signs of the last report, and those that were ever due; during a run, `Health` holds them by name."""
    warnings: Annotated[list[_Warning], Field(max_length=MAX_WARNINGS)] = []
    codebooks: list[Codebook] = []
    """Codebooks of the last report."""
    losses: Annotated[list[float], Field(max_length=RECENT)] = []
    norms: Annotated[list[float], Field(max_length=RECENT + USUAL)] = []
    lowest: float | None = None
    """Lowest median of the losses; None before the first."""
    lowest_at: _Count = 0

    @model_validator(mode="after")
    def _collapsed_codebooks_are_known(self) -> Self:
        lost = {sign.name for sign in self.signs if sign.kind == "collapsed" and sign.present}
        if unknown := lost - {each.name for each in self.codebooks}:
            raise ValueError(f"signs: {min(unknown)!r} is not among the codebooks")
        return self


class Health:
    """Health of a run, judged from its reports, one after the other.

    Args:
        collapse: thresholds of dead runs and collapsed codebooks; None: they are not looked for.
        divergence: thresholds of runs that diverge; None: they are not looked for.
    """

    def __init__(self, collapse: CollapseConfig | None, divergence: DivergenceConfig | None):
        self._collapse, self._divergence = collapse, divergence
        self._state = _State()
        self._signs: dict[tuple[Kind, str], Sign] = {}

    def add(
        self,
        step: int,
        figures: Mapping[str, float],
        loss: float,
        chance: float,
        codes: Mapping[str, int],
        warming_up: bool,
    ) -> list[str]:
        """Judge a report, and return the new warnings.

        Args:
            step: steps done.
            figures: metrics of the report.
            loss: the contrastive loss, or the error of decoded images; NaN if unknown.
            chance: loss of a model that knows nothing.
            codes: number of codes of a codebook, by modality.
            warming_up: whether the learning rate warms up, when the loss may be at chance, or rise.
        """
        state, found = self._state, list[Sign]()
        if self._collapse is not None:
            found += self._dead(self._collapse, step, figures, math.nan if warming_up else loss, chance)
            state.codebooks = [each for name, count in codes.items() for each in read_codebooks(name, figures, count)]
            wait = 0 if step - state.last >= self._collapse.steps else self._collapse.steps  # 0: reports are rare
            lost = [each.name for each in state.codebooks if self._collapse.has_collapsed(each)]
            found += [self._sign("collapsed", name, step, wait) for name in lost]
        is_open = figures.get("bottleneck/share", 1.0) < 1  # codes replace the continuous vectors step by step
        if self._divergence is not None and not warming_up and not is_open:
            found += self._rise(self._divergence, step, loss, chance)
            found += self._explosion(self._divergence, step, figures.get("grad_norm", math.nan))

        new = [sign for sign in found if sign.due and self._is_new(sign, step)]
        for sign in found:
            sign.told = step if sign.due else sign.told
        over = [each for each in self._signs.values() if each.told is not None]
        self._signs = {(each.kind, each.name): each.model_copy(update={"present": False}) for each in over}
        self._signs |= {(each.kind, each.name): each for each in found}
        state.last = step

        messages = [f"{sign.text}. {RESTART}" for sign in new if sign.kind == "dead"]
        for modality in {modality_of(sign.name): None for sign in new if sign.kind == "collapsed"}:
            messages.append(f"{self.describe(modality, due=True)}. {suggest_remedies(modality)}")
        messages += [f"{sign.text}. {REMEDY}" for sign in new if sign.kind == "diverged"]
        state.warnings = [*state.warnings, *(_Warning(step=step, text=each) for each in messages)][-MAX_WARNINGS:]
        return messages

    @property
    def signs(self) -> list[Sign]:
        """Signs of the last report that are due.

        A codebook that has collapsed in the last report counts at once: the next report may never come.
        """
        at_once = self._collapse is not None and self._state.last >= self._collapse.steps
        present = (each for each in self._signs.values() if each.present)
        return [each for each in present if each.due or (each.kind == "collapsed" and at_once)]

    @property
    def codebooks(self) -> list[Codebook]:
        """Codebooks of the last report."""
        return self._state.codebooks

    def describe(self, modality: str, due: bool = False) -> str:
        """Describe the collapsed codebooks of a modality, of which there must be one; ``due``: those that are due."""
        every = [each for each in self._state.codebooks if each.modality == modality]
        since = {sign.name: sign.since for sign in self.signs if sign.kind == "collapsed" and (sign.due or not due)}
        lost = [each for each in every if each.name in since]
        first, few = lost[0], len(lost) == 1
        numbers = first_names([each.number for each in lost], shown=20)
        named = f"codebook{'' if few else 's'} {numbers} of {len(every)}" if first.number else "the codebook"
        return (
            f"{modality}: {named} {'has' if few else 'have'} collapsed since step "
            f"{min(since[each.name] for each in lost)} or before: {_span([each.used for each in lost])} of "
            f"{first.codes:,} codes in use over {first.tokens:,.0f} tokens, where evenly used codes would be "
            f"{first.possible:,.0f}; perplexity {_span([each.perplexity for each in lost])}"
        )

    def summary(self) -> dict[str, Any]:
        """Return the verdict on the run after the last report, as JSON values; empty if nothing is looked for.

        ``verdict`` is a line of text, ``codebooks`` their usage over the window, ``warnings`` those of the whole run.
        """
        if self._collapse is None and self._divergence is None:
            return {}
        texts = [sign.text for sign in self.signs if sign.kind == "dead"]
        word = "DEAD" if texts else "COLLAPSED"
        lost = {modality_of(sign.name): None for sign in self.signs if sign.kind == "collapsed"}
        texts += [self.describe(modality) for modality in lost]
        verdicts = [f"{word}: {'; '.join(texts)}"] if texts else []
        diverged = [sign.text for sign in self._signs.values() if sign.kind == "diverged" and sign.told is not None]
        verdicts += [f"DIVERGED: {'; '.join(diverged)}"] if diverged else []
        state = self.state_dict()
        return {"verdict": "; ".join(verdicts) or HEALTHY, **{each: state[each] for each in ("codebooks", "warnings")}}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        state = self._state.model_copy(update={"signs": list(self._signs.values())}).model_dump()
        return {**state, "codebooks": [each._asdict() for each in self._state.codebooks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: it is not valid.
        """
        loaded = _State.model_validate(state)
        self._state = loaded.model_copy(update={"signs": []})
        self._signs = {(each.kind, each.name): each for each in loaded.signs}

    def _sign(self, kind: Kind, name: str, step: int, wait: int, text: str = "") -> Sign:
        """Return a sign of this report, which is due when it has lasted ``wait`` steps, and then stays so."""
        former = self._signs.get((kind, name))
        lasts = former is not None and former.present
        since = former.since if former is not None and lasts else step
        due = step - since >= wait or (former is not None and lasts and former.due)
        told = None if former is None else former.told
        return Sign(kind=kind, name=name, since=since, due=due, text=text[:1000], told=told)

    def _is_new(self, sign: Sign, step: int) -> bool:
        """Return whether a sign that is due is to be told: it was not due before, or it was absent for long."""
        if sign.told is None or sign.kind == "diverged" or self._collapse is None:
            return sign.told is None
        former = self._signs[sign.kind, sign.name]
        return not (former.present and former.due) and step - sign.told >= _PAUSES * self._collapse.steps

    def _dead(
        self, config: CollapseConfig, step: int, figures: Mapping[str, float], loss: float, chance: float
    ) -> list[Sign]:
        """Find signs of a model that no longer learns."""
        found = []
        if figures.get("grad_norm", math.inf) < 1e-12:
            text = "the gradient is 0, so the model no longer learns"
            found.append(self._sign("dead", "gradient", step, 0, text))
        for modality in MODALITIES:
            if figures.get(f"{modality}/embedding_cosine", 0.0) > 1 - 1e-5:
                text = f"all {modality} embeddings of a batch are equal"
                found.append(self._sign("dead", f"{modality} embeddings", step, 0, text))
        if abs(loss - chance) <= 1e-3 * chance:
            covers_start = not self._state.last and step >= config.steps  # a first report this late
            text = f"the loss is {loss:.4f}, that of a model that knows nothing ({chance:.4f})"
            found.append(self._sign("dead", "loss", step, 0 if covers_start else config.steps, text))
        return found

    def _rise(self, config: DivergenceConfig, step: int, loss: float, chance: float) -> list[Sign]:
        """Find a loss that has been too high for long. Losses that are not finite are left out; guards report those."""
        state = self._state
        state.losses = [*state.losses, *([loss] if math.isfinite(loss) else [])][-RECENT:]
        if len(state.losses) < RECENT:
            return []
        now = statistics.median(state.losses)
        if state.lowest is None or now < state.lowest:
            state.lowest, state.lowest_at = now, step
        gained = chance - state.lowest
        has_learned = gained > 0.2 * chance  # what is lost of less may be noise
        is_lost = has_learned and now > state.lowest + config.lost * gained
        if not is_lost and now <= 1.05 * chance:
            return []
        former = self._signs.get(("diverged", "loss"))
        since = former.since if former is not None and former.present else step
        best = f"{state.lowest:.3f} at step {state.lowest_at}" if has_learned else f"never below {state.lowest:.3f}"
        text = (
            f"the run diverges: the loss has been too high since step {since} and is "
            f"{now:.3f} now; it was {best}, and a model that knows nothing has {chance:.3f}"
        )
        return [self._sign("diverged", "loss", step, config.steps, text)]

    def _explosion(self, config: DivergenceConfig, step: int, norm: float) -> list[Sign]:
        """Find gradients that have become far larger than usual."""
        state = self._state
        state.norms = [*state.norms, *([norm] if math.isfinite(norm) else [])][-RECENT - USUAL :]
        before, recent = state.norms[:-RECENT], state.norms[-RECENT:]
        if len(before) < USUAL // 10:
            return []
        usual, now = statistics.median(before), statistics.median(recent)
        if now <= config.gradient * max(usual, 1e-12):
            return []
        text = f"the run diverges: the gradient norm is {now:.3g}, where {usual:.3g} was usual"
        return [self._sign("diverged", "gradient", step, 0, text)]


def _span(numbers: Sequence[float]) -> str:
    """Return the lowest and the highest number as text: ``3 to 7``, or ``3``."""
    return " to ".join(dict.fromkeys(f"{each(numbers):,.0f}" for each in (min, max)))
