"""The training command as one rank on a machine of its own: ``python -m tests.faults.node config.json``.

Uploads are slow and leave marks.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.commands import command
from tests.faults.job import before
from vqclip.data.remote.files import RemoteFolder
from vqclip.train.step import TrainStep

main = command("train")

UPLOAD_S, STEP_S = 0.02, float(os.environ.get("STEP_S", "0.05"))


def mark(what: str, seconds: float) -> Any:
    """Return a function that leaves a mark and waits."""

    def leave(*args: Any) -> None:
        Path(os.environ["MARKS"], f"{what}-{os.environ['RANK']}-{time.monotonic_ns()}").touch()
        time.sleep(seconds)

    return leave


if __name__ == "__main__":
    before(RemoteFolder, "upload", mark("upload", UPLOAD_S))
    before(TrainStep, "__call__", mark("step", STEP_S))
    sys.exit(main(["--config", sys.argv[1]]))
