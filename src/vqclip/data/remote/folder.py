"""Files below a URL in an object store, with retries and time limits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from vqclip.data.remote.retry import Deadline, FetchError, TransferConfig, retry
from vqclip.data.remote.transfer import object_store, translate_errors
from vqclip.data.remote.urls import display_url, local_path, protocol_of
from vqclip.errors import ConfigError, StorageError

T = TypeVar("T")

STORES = ("s3", "gs", "az")
"""Protocols of object stores that can be written to."""
_SMALL = 1 << 20
"""Bytes of a file that is read into memory."""


def require_writable(folder: str) -> str:
    """Return a local path, or the URL of a folder in an object store, without a slash at its end.

    Raises:
        DataError: another protocol.
        ConfigError: a URL that cannot be written to.
    """
    protocol = protocol_of(folder)
    if protocol is None:
        return folder
    if protocol == "file":
        return local_path(folder)
    if protocol not in STORES or set(folder) & set("?#*"):
        raise ConfigError(
            f"got {display_url(folder)}; expected a local folder, or a URL of {', '.join(STORES)} without ?, # and *"
        )
    return folder.rstrip("/")


class RemoteFolder:
    """Files below a URL; names are relative to it. Every method may be called from any thread.

    An object store has no folders and renames nothing. A file appears whole or not at all, and is seen by all readers
    as soon as it is written.

    Args:
        url: of an object store.
        options: retries and time limits of each call.
        section: key of the options in a configuration, for messages.
    """

    def __init__(self, url: str, options: TransferConfig, section: str = "remote"):
        self.url, self.options, self._section = url, options, section

    def __str__(self) -> str:
        return display_url(self.url)

    def with_limits(self, tries: int, total_s: float) -> RemoteFolder:
        """Return the same folder with other limits for each call."""
        options = self.options.model_copy(update={"tries": tries, "total_s": total_s})
        return RemoteFolder(self.url, options, self._section)

    def list(self, below: str = "") -> dict[str, int]:
        """Return the names of all files below a name, with their sizes in bytes."""
        return {name: int(info["size"]) for name, info in self._find(below).items()}

    def versions(self) -> dict[str, str | None]:
        """Return the names of all files, with a text that changes with their content; None where a store has none."""
        marks = {name: [info.get(key) for key in ("ETag", "etag", "created")] for name, info in self._find("").items()}
        return {name: next((str(each) for each in found if each), None) for name, found in marks.items()}

    def _find(self, below: str) -> dict[str, dict[str, Any]]:
        root = self._path("")

        def find(system: Any, path: str, timeout: float) -> dict[str, dict[str, Any]]:
            system.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                found = system.find(path, detail=True, timeout=timeout)
                return {each.removeprefix(root): info for each, info in found.items() if _is_plain(each, root)}
            return {}

        return self._call(below, "listed", find)

    def require_tree(self, names: Iterable[str]) -> None:
        """Check that files with these names can be copied to a disk.

        Raises:
            StorageError: one of them is also the name of a folder of another one.
        """
        files = set(names)
        for name in sorted(files):
            folder = next((each.as_posix() for each in PurePosixPath(name).parents if each.as_posix() in files), None)
            if folder is not None:
                raise StorageError(
                    f"{self._show(folder)}: is an object, and a folder of {self._show(name)} too, which no disk can "
                    "hold; remove or rename one of them"
                )

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if there is none.

        Raises:
            StorageError: it cannot be read, or is larger than a MiB.
        """

        def read(system: Any, path: str, timeout: float) -> bytes | None:
            try:
                return bytes(system.cat_file(path, start=0, end=_SMALL + 1, timeout=timeout))
            except FileNotFoundError:
                return None
            except Exception:  # S3 refuses any range of an empty object
                if system.info(path, timeout=timeout)["size"] == 0:
                    return b""
                raise

        content = self._call(name, "read", read)
        if content is not None and len(content) > _SMALL:
            raise StorageError(f"{self._show(name)}: has more than {_SMALL} bytes; at most these are read")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; replaces another one."""
        self._call(name, "written", lambda system, path, timeout: system.pipe_file(path, content, timeout=timeout))

    def upload(self, name: str, path: Path) -> None:
        """Copy a local file to a name; replaces another one."""
        self._call(name, "written", lambda system, to, timeout: system.put_file(str(path), to, timeout=timeout))

    def download(self, name: str, path: Path) -> None:
        """Copy a file to a local path, in blocks."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._call(name, "fetched", lambda system, of, timeout: system.get_file(of, str(path), timeout=timeout))

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

        def remove(system: Any, path: str, timeout: float) -> None:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(path, timeout=timeout)

        self._call(name, "removed", remove)

    def _call(self, name: str, done: str, action: Callable[[Any, str, float], T]) -> T:
        url = f"{self.url}/{name}"

        def once(deadline: Deadline) -> T:
            with translate_errors(url):
                system = object_store(url, self.options.timeout_s)
                try:
                    return action(system, self._path(name), max(deadline.left, 0.001))
                except FileNotFoundError:
                    raise FetchError(
                        f"there is no such {'bucket' if done == 'written' else 'file'}", again=False
                    ) from None

        return retry(once, url, self.options, None, done, self._section)

    def _path(self, name: str) -> str:
        return f"{self.url.partition('://')[2]}/{name}"

    def _show(self, name: str) -> str:
        return display_url(f"{self.url}/{name}")


def _is_plain(path: str, root: str) -> bool:
    """Return whether a name can be a path below a local folder; markers of empty folders are left out too."""
    name = path.removeprefix(root)
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))
