"""An object store in the memory of a test, which can fail, and runs in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from vqclip.checkpoint.folders import write_folder
from vqclip.data.remote import TransferConfig
from vqclip.train.run_store import RunMirror

URL = "s3://bucket/runs/tiny"


class Store(MemoryFileSystem):
    """Fails by ``failing``: name of a method -> errors of its next calls, None for a call that succeeds."""

    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]
    failing: dict[str, list[Exception | None]]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("find", "cat_file", "pipe_file", "put_file", "get_file", "rm_file", "cp_file"):
            return found

        def call(*args: Any, timeout: float, **options: Any) -> Any:
            assert timeout > 0
            errors = self.failing.get(name, self.failing.get("all"))
            if errors and (error := errors.pop(0)):
                raise error
            result = found(*args, **options)
            # A bucket's names have no slash at the beginning.
            return {each.lstrip("/"): info for each, info in result.items()} if name == "find" else result

        return call

    def names(self) -> list[str]:
        return sorted(name.removeprefix("/bucket/runs/tiny/") for name in self.store)


def mirror_of(folder: Path) -> RunMirror:
    folder.mkdir(parents=True, exist_ok=True)
    return RunMirror(URL, folder, TransferConfig(tries=3))


def save(folder: Path, step: int, content: str = "weights") -> Path:
    """A checkpoint with one file."""

    def fill(aside: Path) -> None:
        (aside / "model").mkdir()
        (aside / "model" / "weights").write_text(f"{content} {step}")

    return write_folder(folder / "checkpoints", step, fill)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())
