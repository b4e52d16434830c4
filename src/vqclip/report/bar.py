"""The bar that a person watches while a run trains."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from tqdm import tqdm


class Bar:
    """A tqdm bar over the steps of a run, with loss, images a second and data wait; or over samples.

    Args:
        total: steps of the run.
        done: steps done before this process started.
        visible: False on all ranks but one.
        name: shown in front.
        unit: what is counted.
    """

    def __init__(self, total: int, done: int, visible: bool, name: str, unit: str = "step"):
        self._bar = tqdm(
            total=total, initial=done, disable=not visible, desc=name, unit=unit, dynamic_ncols=True, smoothing=0.05
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, count: int = 1) -> None:
        """So many steps more are done."""
        self._bar.update(count)

    def show(self, figures: dict[str, Any]) -> None:
        """Put the newest figures behind the bar."""
        shown = {"loss": f"{figures['loss/total']:.3f}"}
        if "images_per_second" in figures:
            shown["img/s"] = f"{figures['images_per_second']:.0f}"
            shown["data"] = f"{figures['data_wait']:.0%}"
        self._bar.set_postfix(shown, refresh=False)

    def last_line(self, text: str) -> None:
        """What stays behind the bar when it is done."""
        self._bar.set_postfix_str(text)
