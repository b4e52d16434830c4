"""State of a run in its checkpoints beside the tensors, and the retention of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, JsonValue

from vqclip.io.json_files import Strict


@dataclass(frozen=True)
class RetentionPolicy:
    """Retention policy for checkpoints."""

    newest: int
    """Number of recent checkpoints to keep."""
    every: int | None = None
    """Also keep the checkpoints after every ``every`` steps; None for no others."""

    def keeps(self, step: int, best: int | None) -> bool:
        """Return whether the checkpoint of ``step`` stays when it is no longer among the newest."""
        return step == best or (self.every is not None and step % self.every == 0)


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Best(Strict):
    step: _Count
    figure: str
    value: float


class RunState(Strict):
    """``state.json`` of a checkpoint.

    The sample order, the augmentation and the random numbers of the towers are functions of (seed, step): the step is
    the whole data position, and there is no generator state to save.
    """

    identity: dict[str, JsonValue]
    scaler: dict[str, float | int]
    guards: dict[str, JsonValue]
    replaced: dict[str, _Count]
    caption_lengths: dict[Annotated[str, Field(pattern=r"^[0-9]{1,4}$")], _Count]
    best: _Best | None
