"""Trackio: a local database and dashboard."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from PIL.Image import Image
from pydantic import Field

from vqclip.errors import ConfigError
from vqclip.io.atomic import write_text
from vqclip.runlog.trackers.base import RunFacts, Tracker, TrackerConfigBase

_ID = "trackio.id"


class Trackio(Tracker):
    """A run in trackio's database on this machine, which ``trackio show --project vqclip`` draws.

    On resume the run in the database is deleted and made again from ``metrics.jsonl``, so it has each step once,
    whatever the killed process left behind. The price: times and images of before the resume are lost, and a resume
    takes a second or two for every thousand lines.

    Args:
        config: project.
    """

    def __init__(self, config: TrackioConfig):
        self._config = config
        self._run: Any = None

    def start(self, facts: RunFacts, resumed: int) -> int:
        """Open a new run, and delete the former one, whose id is in ``<run>/trackio.id``."""
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it tells its users how to look at the dashboard
            self._run = trackio.init(
                project=self._config.project,
                name=facts.name,
                config=facts.config,
                resume="never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        if (facts.folder / _ID).exists():  # also where it was killed before its first checkpoint
            self._delete((facts.folder / _ID).read_text().strip())
        write_text(facts.folder / _ID, f"{self._run.id}\n")  # before the first row, with which the run begins to exist
        return -1

    def _delete(self, run_id: str) -> None:
        import trackio

        with contextlib.suppress(ValueError):  # there is no such project
            for run in trackio.Api().runs(self._config.project):
                if run.id == run_id and not run.delete():
                    raise OSError(f"the former run {run_id} cannot be deleted")

    def log(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Log scalars and histograms as one row."""
        import trackio

        drawn = {name: trackio.Histogram(list(values)) for name, values in histograms.items()}
        self._run.log({**scalars, **drawn}, step=step)

    def images(self, step: int, images: Mapping[str, Image]) -> None:
        """Log images as a row of their own."""
        import trackio

        self._run.log({name: trackio.Image(image) for name, image in images.items()}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Raise an alert."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.alert(title=name, text=text, step=step)

    def close(self) -> None:
        """Write everything."""
        import trackio

        if self._run is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                trackio.finish()


class TrackioConfig(TrackerConfigBase):
    """Trackio's database on this machine; needs ``pip install 'vqclip[trackio]'``."""

    package: ClassVar[str | None] = "trackio"
    kind: Literal["trackio"] = "trackio"
    """Trackio."""
    project: str = Field("vqclip", min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")
    """Project that the run belongs to."""

    def require(self) -> None:
        """Check that the package is installed, and that it would write to this machine.

        Raises:
            ConfigError: it is not, or the environment names a server.
        """
        super().require()
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(name):
                raise ConfigError(
                    f"run.trackers: trackio: the environment has {name}, but this tracker writes to this machine only: "
                    "unset it, and send the project later with `trackio sync`"
                )

    def build(self) -> Trackio:
        """Make the tracker."""
        return Trackio(self)
