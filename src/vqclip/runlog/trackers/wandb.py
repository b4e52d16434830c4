"""Weights & Biases, offline or online."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from vqclip.io.atomic import write_text
from vqclip.runlog.trackers.feed import RunFacts, Tracker, TrackerConfigBase

_ID = "wandb.id"


class Wandb(Tracker):
    """A run of Weights & Biases in ``<run>/wandb``.

    Offline there is one folder, which ``wandb sync`` sends later. On resume it is made again from ``metrics.jsonl``, so
    it has each step once, whatever the killed process left behind. The price: times and figures of the machine of
    before the resume are lost, and a resume takes a second or two for every thousand lines. A folder that was sent
    already stays; the resumed run then gets another id, and is sent as a new run with all steps.

    Online the server keeps what it has: the steps up to its last one are not sent again. After a kill, their speeds are
    those of the first time, and so is everything if the settings were changed.

    Neither the command line nor the environment, the code or the repository is recorded.

    Args:
        config: project and mode.
    """

    def __init__(self, config: WandbConfig):
        self._config = config
        self._run: Any = None
        self.appends_only = config.mode == "online"

    def start(self, facts: RunFacts, resumed: int) -> int:
        """Open the run, with the id in ``<run>/wandb.id``."""
        import wandb

        config, offline = self._config, self._config.mode == "offline"
        run_id = _read_id(facts.folder)
        if offline and not _remove_unsent(facts.folder / "wandb", run_id):
            run_id = uuid.uuid4().hex[:12]
        write_text(facts.folder / _ID, f"{run_id}\n")
        quiet = wandb.Settings(
            console="off",
            silent=offline,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=facts.name,
            id=run_id,
            dir=str(facts.folder),
            mode=config.mode,
            resume=None if offline else "allow",
            config=facts.config,
            reinit="create_new",  # the program may have a run of its own
            settings=quiet,
        )
        return -1 if offline else int(self._run.starting_step) - 1

    def log(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Log scalars and histograms as one row."""
        import wandb

        drawn = {name: wandb.Histogram(list(values), num_bins=16) for name, values in histograms.items()}
        self._run.log({**scalars, **drawn}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Raise an alert; offline it is sent with the rest."""
        self._run.alert(title=name, text=f"step {step}: {text}")

    def close(self) -> None:
        """Write or send everything."""
        if self._run is not None:
            self._run.finish()


def _read_id(folder: Path) -> str:
    """Return the id of the run in ``folder``, also of one that was killed before its first checkpoint; or a new one."""
    found = (folder / _ID).read_text().strip() if (folder / _ID).exists() else ""
    return found if found.isalnum() else uuid.uuid4().hex[:12]


def _remove_unsent(folder: Path, run_id: str) -> bool:
    """Remove the offline folders of a run that are not sent; return whether none was sent."""
    found = sorted(folder.glob(f"offline-run-*-{run_id}"))
    sent = [each for each in found if any(each.glob("*.synced"))]
    for each in found:
        if each not in sent:
            shutil.rmtree(each, ignore_errors=True)
    return not sent


class WandbConfig(TrackerConfigBase):
    """Weights & Biases; needs ``pip install 'vqclip[wandb]'``."""

    package: ClassVar[str | None] = "wandb"
    kind: Literal["wandb"] = "wandb"
    """Weights & Biases."""
    project: str = Field("vqclip", min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; null: the one of the login."""
    mode: Literal["offline", "online"] = "offline"
    """offline: write to the run's folder, without network and login, for `wandb sync`; online: send to the server,
    after `wandb login`."""

    def build(self) -> Wandb:
        """Make the tracker."""
        return Wandb(self)
