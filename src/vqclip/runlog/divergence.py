"""Detection of runs that diverge: a loss that rises instead of falling, and gradients that explode.

every report:  check(loss, gradient norm)   medians of the last reports against the best and the usual ones;
                                            warn once for each sign
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Annotated, Any

from pydantic import Field

from vqclip.config import Config
from vqclip.io.json_files import Strict

RECENT = 5
"""Reports whose median counts as the present value."""
USUAL = 100
"""Reports before those, whose median is the usual gradient norm; at least a tenth of them is needed."""
REMEDY = (
    "Stop it and start again with a lower optim.lr (a tenth) or a longer optim.warmup_steps, or resume it from a "
    "checkpoint of before, with a lower optim.lr and run.resume_allow=[optim]"
)
"""Advice for a run that diverges."""


class DivergenceConfig(Config):
    """Thresholds for a run that diverges."""

    lost: float = Field(0.5, gt=0)
    """The contrastive loss has diverged if it has lost more than this fraction of what it had gained, from the loss of
    a model that knows nothing to the lowest loss so far; also if it is higher than the former by a twentieth."""
    gradient: float = Field(100.0, gt=1)
    """The gradient explodes if its norm is more than this many times the usual one."""
    steps: int = Field(100, ge=1)
    """Steps for which the loss is too high before the warning; an exploding gradient is reported at once."""

    def build(self) -> DivergenceWatch:
        """Make the watch of a run."""
        return DivergenceWatch(self)


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Warning(Strict):
    step: _Count
    text: Annotated[str, Field(max_length=1000)]


class _State(Strict):
    losses: Annotated[list[float], Field(max_length=RECENT)]
    norms: Annotated[list[float], Field(max_length=RECENT + USUAL)]
    lowest: float | None
    at: _Count
    since: _Count | None
    told: dict[str, Annotated[str, Field(max_length=1000)]]
    warnings: list[_Warning]


class DivergenceWatch:
    """Watch for divergence: checks every report, and warns once for each sign in the whole run.

    Medians over a few reports make it blind to single spikes, which the guards record.

    Args:
        config: thresholds.
    """

    def __init__(self, config: DivergenceConfig):
        self._config = config
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=RECENT + USUAL)
        self._lowest, self._at = math.inf, 0
        """Lowest median of the losses, and its step."""
        self._since: int | None = None
        """Step from which on the loss has been too high without a break."""
        self._told: dict[str, str] = {}
        self._warnings: list[dict[str, Any]] = []
        self.signs: dict[str, str] = {}
        """Signs of the last report, in words."""

    def check(self, done: int, loss: float, grad_norm: float, chance: float) -> list[str]:
        """Check the metrics of a report, and return the new warnings.

        Call it when the loss is due to fall: not during the warm-up of the learning rate, nor while codes replace
        continuous vectors. Values that are not finite are left out; the guards report those.

        Args:
            done: steps done.
            loss: the contrastive loss.
            grad_norm: norm of the gradient before clipping.
            chance: loss of a model that knows nothing.
        """
        if math.isfinite(loss):
            self._losses.append(loss)
        if math.isfinite(grad_norm):
            self._norms.append(grad_norm)
        found = {"loss": self._rise(done, chance), "gradient": self._explosion()}
        self.signs = {name: text for name, text in found.items() if text}
        new = {name: text for name, text in self.signs.items() if name not in self._told}
        self._told |= new
        messages = [f"{text}. {REMEDY}" for text in new.values()]
        self._warnings += [{"step": done, "text": message} for message in messages]
        return messages

    def _rise(self, done: int, chance: float) -> str:
        """Describe a loss that has been too high for long; empty for any other."""
        if len(self._losses) < RECENT:
            return ""
        now = statistics.median(self._losses)
        if now < self._lowest:
            self._lowest, self._at = now, done
        gained = chance - self._lowest
        has_learned = gained > 0.2 * chance  # what is lost of less may be noise
        is_lost = has_learned and now > self._lowest + self._config.lost * gained
        if not is_lost and now <= 1.05 * chance:
            self._since = None
            return ""
        self._since = done if self._since is None else self._since
        if done - self._since < self._config.steps:
            return ""
        best = f"{self._lowest:.3f} at step {self._at}" if has_learned else f"never below {self._lowest:.3f}"
        return (
            f"the run diverges: the loss has been too high since step {self._since} and is {now:.3f} now; it was "
            f"{best}, and a model that knows nothing has {chance:.3f}"
        )

    def _explosion(self) -> str:
        """Describe gradients that have become far larger than usual; empty for any others."""
        before, recent = list(self._norms)[:-RECENT], list(self._norms)[-RECENT:]
        if len(before) < USUAL // 10:
            return ""
        usual, now = statistics.median(before), statistics.median(recent)
        if now <= self._config.gradient * max(usual, 1e-12):
            return ""
        return f"the run diverges: the gradient norm is {now:.3g}, where {usual:.3g} was usual"

    def health(self) -> dict[str, Any]:
        """Return ``verdict``, empty for a run that did not diverge, and ``warnings``, as JSON values."""
        return {"verdict": "; ".join(self._told.values()), "warnings": self._warnings}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        lowest = self._lowest if math.isfinite(self._lowest) else None
        numbers = {"losses": list(self._losses), "norms": list(self._norms), "lowest": lowest, "at": self._at}
        return {**numbers, "since": self._since, "told": dict(self._told), "warnings": list(self._warnings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: it is not valid.
        """
        plain = _State.model_validate(state).model_dump()
        self._losses = deque(plain["losses"], maxlen=RECENT)
        self._norms = deque(plain["norms"], maxlen=RECENT + USUAL)
        self._lowest = math.inf if plain["lowest"] is None else plain["lowest"]
        self._at, self._since, self._told = plain["at"], plain["since"], plain["told"]
        self._warnings = plain["warnings"]
