"""Trackers: programs that keep and draw the metrics of runs. `Feed` sends them the lines of ``metrics.jsonl``.

Each kind is one file with its config class, and one line in the union `TrackerConfig`; its contract is `Tracker`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator

from vqclip.runlog.trackers.feed import Feed, RunFacts, Tracker, TrackerConfigBase, view
from vqclip.runlog.trackers.tensorboard import TensorBoardConfig
from vqclip.runlog.trackers.wandb import WandbConfig

__all__ = [
    "Feed",
    "RunFacts",
    "TensorBoardConfig",
    "Tracker",
    "TrackerConfig",
    "TrackerConfigBase",
    "Trackers",
    "WandbConfig",
    "view",
]


def _section(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _differ(trackers: Sequence[TrackerConfigBase]) -> Sequence[TrackerConfigBase]:
    kinds = [tracker.kind for tracker in trackers]
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ValueError(f"got {twice[0]} twice; expected each tracker once")
    return trackers


_Known = TensorBoardConfig | WandbConfig

TrackerConfig = Annotated[Annotated[_Known, Discriminator("kind")], BeforeValidator(_section)]
"""Configuration of a tracker: its name, or a mapping with its ``kind`` and settings."""

Trackers = Annotated[tuple[TrackerConfig, ...], AfterValidator(_differ)]
"""Configuration of all trackers of a run."""
