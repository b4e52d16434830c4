"""Trackers, and how they are fed: each step of ``metrics.jsonl`` once, whenever the process was killed.

`Tracker` is the contract of one, `Feed` calls them. They show a `view` of the file: few scalars in groups, and
histograms over codebooks.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vqclip.config import Config
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError
from vqclip.runlog.health import CODED, codebook_names
from vqclip.runlog.metrics import read_metrics

logger = logging.getLogger(__name__)

_CONSTANT = ("tokens", "usage_if_uniform")
"""Figures of the window over which codes are counted; they are in ``metrics.jsonl``."""
_DRAWN = ("usage", "bits_used", "oldest")
"""Figures of single codebooks that are drawn; the perplexity is that of the bits in use."""
_SPEED = (
    "images_per_second",
    "tokens_per_second",
    "data_wait",
    "exchange_wait",
    "tflops_per_second",
    "mfu",
    "memory_gib",
)
_CODEBOOK = re.compile(r"(image|text|detail)/[0-9]+/")


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that a tracker shows; no text in them has credentials."""

    name: str
    folder: Path
    config: dict[str, Any]
    """The whole configuration as plain data."""
    text: str
    """This configuration as YAML."""


class Tracker:
    """One tracker of a run, on rank 0. `Feed` calls it, and ends it with a warning if a method raises anything."""

    appends_only: bool = False
    """Whether it never gives up a step that it has, so that nothing can be added to this step later."""

    def start(self, facts: RunFacts, resumed: int) -> int:
        """Open the tracker.

        Args:
            facts: the run.
            resumed: steps done: 0 for a new run, the checkpoint's step on resume.

        Returns:
            Step up to which it has everything; later steps are sent again from ``metrics.jsonl``, and it must have
            given up what it had of them.
        """
        raise NotImplementedError

    def log(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Take all metrics of a step, at once; steps increase. Scalars may be NaN or infinite."""
        raise NotImplementedError

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text, such as a warning."""

    def flush(self) -> None:
        """Write everything to the disk that must survive the process, as `start` counts on it."""

    def close(self) -> None:
        """Write everything and close."""


class TrackerConfigBase(Config):
    """Base of the configurations of trackers."""

    package: ClassVar[str | None] = None
    """Package, and extra of vqclip, that it needs."""
    kind: str

    def require(self) -> None:
        """Check that the package is installed; without importing it.

        Raises:
            ConfigError: it is not.
        """
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"run.trackers: {self.kind}: the package {self.package} is not installed; expected it, by pip install "
                f"'vqclip[{self.package}]'; or remove {self.kind} from run.trackers"
            )

    def build(self) -> Tracker:
        """Make the tracker, closed."""
        raise NotImplementedError


class Feed:
    """Sends the lines of ``metrics.jsonl`` to trackers; on one rank.

    ``metrics.jsonl`` is what is true: after a resume it has each step once, and none after the checkpoint. A tracker
    says up to which step it has everything, and is sent the later ones from the file, before the run continues. All
    lines of a step are sent as one when a later step begins, so trackers are behind the file by one report. What a
    tracker does on resume is in the docstrings of its class; so are the prices.

    An error in a tracker is a warning, and the run continues without it. Only at the start of a new run it ends the
    run, before the first step.

    Args:
        trackers: by kind, closed.
        facts: the run.
        path: ``metrics.jsonl``, without the lines after ``resumed``.
        resumed: steps done.

    Raises:
        ConfigError: a tracker of a new run cannot start.
    """

    def __init__(self, trackers: Mapping[str, Tracker], facts: RunFacts, path: Path, resumed: int):
        self._trackers, self._resumed = dict(trackers), resumed
        self._row: dict[str, Any] = {}
        """Metrics of the newest step; it may get more."""
        self._step = -1
        try:
            self._has = {kind: self._start(kind, facts) for kind in trackers}
            if resumed and self._trackers and path.exists():
                first = min(self._has[kind] for kind in self._trackers)
                for row in read_metrics(path, skip_damaged=True):
                    if row["step"] > first:
                        self.write(row["step"], row)
        except BaseException:
            self.close(finished=False)
            raise

    def _start(self, kind: str, facts: RunFacts) -> int:
        try:
            return self._trackers[kind].start(facts, self._resumed)
        except Exception as error:  # another package may raise anything
            told = f"{kind} cannot start: {type(error).__name__}: {mask_credentials(str(error)).rstrip('.')}"
            if not self._resumed:
                raise ConfigError(
                    f"run.trackers: {told}. Correct its settings, or remove it from run.trackers"
                ) from error
            self._give_up(kind, told)
            return 0

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Take the values of a line of the file."""
        self.flush(step)
        self._step = step
        self._row |= row

    def flush(self, done: int) -> None:
        """Send the steps before ``done``, which are complete, and have them written; call it before a checkpoint."""
        if self._step < done:
            self._send_row(self._trackers)
        if not self._row:
            self._call("flush", lambda tracker: tracker.flush())

    def _send_row(self, kinds: Iterable[str]) -> None:
        step, row, self._row = self._step, self._row, {}
        if row:
            scalars, histograms = view(row)
            lacking = [kind for kind in kinds if kind in self._trackers and step > self._has[kind]]
            self._call("log", lambda tracker: tracker.log(step, scalars, histograms), lacking)

    def text(self, step: int, name: str, text: str) -> None:
        """Send a text, with credentials masked."""
        self._call("text", lambda tracker: tracker.text(step, name, mask_credentials(text)))

    def close(self, finished: bool) -> None:
        """Send what is left, and close; may be called twice.

        Args:
            finished: whether the run is at its end; otherwise a resumed run may evaluate its last step.
        """
        self._send_row([kind for kind, each in self._trackers.items() if finished or not each.appends_only])
        self._call("close", lambda tracker: tracker.close())
        self._trackers = {}

    def _call(self, name: str, call: Callable[[Tracker], object], kinds: Sequence[str] | None = None) -> None:
        for kind in list(self._trackers) if kinds is None else kinds:
            try:
                call(self._trackers[kind])
            except Exception as error:
                self._give_up(kind, f"{kind} failed ({name}: {type(error).__name__}: {mask_credentials(str(error))})")

    def _give_up(self, kind: str, told: str) -> None:
        del self._trackers[kind]
        logger.warning(
            "%s: the run continues without it; metrics.jsonl has everything, and a resumed run sends what it lacks",
            told,
        )


def view(row: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return scalars and histograms of a step by the names that trackers show, from its metrics in ``metrics.jsonl``.

    The groups are ``train/``, ``image codes/``, ``text codes/``, ``detail codes/``, ``speed/``, ``data/`` and
    ``eval/``; other names stay. What each codebook has alone becomes a histogram; the lowest usage is a scalar, too.
    Rates of the mode *quantized* are left out where those of *codes only* are equal to them.
    """
    numbers = {name: float(value) for name, value in row.items() if type(value) in (int, float) and name != "step"}
    scalars = {_display_name(name): value for name, value in numbers.items() if _is_shown(name, numbers)}
    histograms: dict[str, list[float]] = {}
    for modality in CODED:
        for figure in _DRAWN:
            names = [name for name in codebook_names(numbers, modality) if name != modality]
            values = [numbers[f"{name}/{figure}"] for name in names if f"{name}/{figure}" in numbers]
            if values and all(map(math.isfinite, values)):
                histograms[f"{modality} codes/{figure} by codebook"] = values
            if values and figure == "usage":
                scalars[f"{modality} codes/usage of the worst codebook"] = min(values)
    return scalars, histograms


def _is_shown(name: str, numbers: Mapping[str, float]) -> bool:
    equal = name.startswith("eval/") and name.replace("/quantized/", "/codes_only/")
    has_equal = equal and equal != name and numbers.get(equal) == numbers[name]
    return not (has_equal or _CODEBOOK.match(name) or name.split("/")[-1] in _CONSTANT)


def _display_name(name: str) -> str:
    modality, _, rest = name.partition("/")
    if modality in CODED:
        return f"{modality} codes/{rest}"
    if name in _SPEED:
        return f"speed/{name}"
    named = modality in ("loss", "temperature", "fp16", "bottleneck") or name in ("grad_norm", "lr")
    return f"train/{name}" if named else name
