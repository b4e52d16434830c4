"""The contract of trackers: programs that keep and draw the metrics of runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from PIL.Image import Image

from vqclip.config import Config
from vqclip.errors import ConfigError


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that a tracker shows; no text in them has credentials."""

    name: str
    folder: Path
    config: dict[str, Any]
    """The whole configuration as plain data."""
    text: str
    """This configuration as YAML."""
    hyperparameters: dict[str, float | int | bool | str]
    """Settings that differ from the defaults, and the most important others, by their keys."""
    final: tuple[str, ...]
    """Scalars whose last values stand for the run, such as the codes-only rates of its evaluations."""


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

    def images(self, step: int, images: Mapping[str, Image]) -> None:
        """Take images of a step, before its metrics."""

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
