"""Find the shards that a user's paths name."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from vqclip.data.remote.files import TAR_ENDINGS, Shard, remote_shards
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.urls import display_url, local_path
from vqclip.data.sources.columns import is_split
from vqclip.errors import DataError
from vqclip.io.files import expand_home

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")
_MAX_SHARDS = 10_000_000


def find_shards(
    paths: str | Sequence[str | Path],
    remote: RemoteConfig | None = None,
    endings: Sequence[str] = TAR_ENDINGS,
    allow_missing: bool = False,
) -> list[Shard]:
    """Return all shards that the paths name, in the given order.

    Args:
        paths: one or several: a tar file (.tar, .tar.gz, .tgz), a folder (all tars directly in it, sorted by name), a
            pattern with braces in WebDataset's form (``train/{00000..00041}.tar``; every file must exist), or a glob
            (``train/*.tar``). URLs work the same way, but http and https cannot list folders, so every shard must be
            named. Shards at URLs are not checked until they are downloaded.
        remote: how shards at URLs are downloaded.
        endings: of the files in a folder; for other files than tars.
        allow_missing: return shards of a pattern with braces that are missing, too.

    Raises:
        DataError: a path names nothing or cannot be read, a shard is missing or listed twice, or a protocol is not
            allowed.
    """
    paths = [paths] if isinstance(paths, str) else paths
    try:
        shards = [
            shard for path in paths for shard in _find(str(path), remote or RemoteConfig(), endings, allow_missing)
        ]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    seen: set[Shard] = set()
    for shard in shards:
        if "\n" in str(shard):
            raise DataError(f"{str(shard)!r}: a line break in the name of a shard; rename it")
        if shard in seen:
            raise DataError(f"{shard}: listed twice; to show a source more often, raise its weight")
        seen.add(shard)
    return shards


def describe_splits(files: Sequence[Shard]) -> tuple[str, ...]:
    """Return a note if names of the files tell several splits, such as train-00000-of-00002.parquet."""
    words = (next(filter(is_split, re.split(r"[-_.]", file.name)), None) for file in files)
    splits = Counter(filter(None, words))
    if len(splits) < 2:
        return ()
    shown = ", ".join(f"{split} ({count})" for split, count in sorted(splits.items()))
    one = next((name for name in ("train", "training") if name in splits), min(splits))
    reads = f"{str(files[0]).rpartition('/')[0]}/*{one}*{os.path.splitext(files[0].name)[1]}"
    return (f"files of splits {shown} are read together; the path {reads} reads one",)


def expand_braces(pattern: str) -> list[str]:
    """Expand braces: ``a{1,2}/{08..10}`` → ``a1/08 a1/09 a1/10 a2/08 ...``; nested braces are not supported.

    Raises:
        DataError: more than ten million results.
    """
    parts = _BRACES.split(pattern)  # text, content of braces, text, ...
    choices = [[part] if number % 2 == 0 else _choices(part) for number, part in enumerate(parts)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > _MAX_SHARDS:
        raise DataError(f"{display_url(pattern)}: names {count} shards; at most {_MAX_SHARDS} are allowed")
    return ["".join(parts) for parts in itertools.product(*choices)]


def strip_common_folders(paths: Sequence[str]) -> list[str]:
    """Remove the folders that all paths have in common."""
    length = len(common_folder(paths))
    return [path[length:] for path in paths]


def common_folder(paths: Iterable[str]) -> str:
    """Return the longest folder that contains all paths or URLs, with the slash at its end; empty if there is none."""
    folders = {path[: path.rfind("/") + 1] for path in paths}
    common = os.path.commonprefix([*folders])  # noqa: RUF071, `commonpath` changes URLs
    return common[: common.rfind("/") + 1]


def _choices(content: str) -> list[str]:
    match = _RANGE.match(content)
    if match is None:
        return content.split(",")
    first, last = int(match[1]), int(match[2])
    if abs(last - first) >= _MAX_SHARDS:
        raise DataError(f"{{{content}}}: more than {_MAX_SHARDS} numbers")
    padded = match[1].startswith("0") or match[2].startswith("0")
    width = max(len(match[1]), len(match[2])) if padded else 0
    step = 1 if first <= last else -1
    return [f"{number:0{width}d}" for number in range(first, last + step, step)]


def _find(path: str, remote: RemoteConfig, endings: Sequence[str], allow_missing: bool) -> list[Shard]:
    if (local := local_path(path)) is not None:
        return [*_find_local(local, endings, allow_missing)]
    return [shard for url in expand_braces(path) for shard in remote_shards(url, remote, endings)]


def _find_local(path: str, endings: Sequence[str], allow_missing: bool) -> list[Path]:
    exact = expand_home(path)
    full = str(exact)
    if os.path.isdir(exact):  # unlike Path.is_dir, also for a pattern that is longer than a name of a file
        return _files_in(exact, endings)
    if os.path.exists(exact):
        return [exact.absolute()]
    if any(mark in full for mark in "*?["):
        found = [Path(name).absolute() for name in sorted(glob.glob(full))]
        if not found:
            raise DataError(f"{path}: matches no file (from {Path.cwd()})")
        return found
    names = [Path(name) for name in expand_braces(full)]
    missing = [name for name in names if not os.path.isfile(name)]
    if missing and len(names) == 1:
        raise DataError(
            f"{names[0].absolute()}: no such file or folder; expected a file, a folder of *{endings[0]}, or a pattern "
            f"such as train/{{00000..00041}}{endings[0]}"
        )
    if missing and not allow_missing:
        shown = ", ".join(str(name) for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        advice = ", or leave them out: bad_shards: leave_out" if endings[0] in TAR_ENDINGS else ""
        raise DataError(
            f"{path}: {len(missing)} of {len(names)} files are missing: {shown}. Name the folder or a pattern such as "
            f"*{endings[0]}{advice}"
        )
    return [name.absolute() for name in names]


def _files_in(folder: Path, endings: Sequence[str]) -> list[Path]:
    tars = sorted(file.absolute() for file in folder.iterdir() if file.name.endswith(tuple(endings)))
    tars = [file for file in tars if file.name[0] != "."]  # copies in progress, and macOS's
    names = {file.name for file in tars}
    for name in sorted(names):
        if names & {f"{name}.gz", f"{name.removesuffix('.tar')}.tgz"}:
            raise DataError(f"{folder.absolute()}: {name} is there plain and compressed; remove one of them")
    if not tars:
        files = sorted(file.name for file in folder.iterdir())
        below = sorted(file.parent.name for file in folder.glob("*/*") if file.name.endswith(tuple(endings)))
        hint = f"; found some in {', '.join(dict.fromkeys(below))}: did you mean one of these?" if below else ""
        patterns = ", ".join(f"*{ending}" for ending in endings)
        shown = f"it contains {', '.join(files[:5])}{', ...' if len(files) > 5 else ''}" if files else "it is empty"
        raise DataError(f"{folder.absolute()}: no {patterns} in this folder ({shown}){hint}")
    return tars
