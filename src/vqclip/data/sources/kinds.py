"""All kinds of sources, and reading the configuration of one, from YAML or from a command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from vqclip.config import did_you_mean, parse_config
from vqclip.config.types import kinds_of
from vqclip.data.remote import display_url
from vqclip.data.sources.base import SourceConfigBase
from vqclip.data.sources.classes import ClassShardsConfig
from vqclip.data.sources.csv_table import CsvConfig
from vqclip.data.sources.detect import find_kind
from vqclip.data.sources.folder import FolderConfig
from vqclip.data.sources.hf import HfConfig
from vqclip.data.sources.json_table import JsonConfig
from vqclip.data.sources.parquet import ParquetConfig
from vqclip.data.sources.plugins import installed_kinds, load_kind
from vqclip.data.sources.scenes import ScenesSourceConfig
from vqclip.data.sources.shards import CaptionShardsConfig
from vqclip.data.sources.torchvision import TorchvisionConfig
from vqclip.errors import ConfigError

__all__ = ["KINDS", "SourceConfig", "parse_source"]


_Known = (
    CaptionShardsConfig
    | ClassShardsConfig
    | CsvConfig
    | FolderConfig
    | HfConfig
    | JsonConfig
    | ParquetConfig
    | ScenesSourceConfig
    | TorchvisionConfig
)

KINDS: dict[str, type[SourceConfigBase]] = {
    kind: config for kind, config in kinds_of(_Known).items() if issubclass(config, SourceConfigBase)
}
"""Config classes of the kinds of this package, by kind."""


def parse_source(path: str | Path | Sequence[str], overrides: Sequence[str] = (), **defaults: Any) -> SourceConfigBase:
    """Return the configuration of the source at a path; its kind is found out where it is plain.

    Args:
        path: file, folder, pattern or URL; several for kinds that read several; for a kind without a path, such as
            torchvision, none or the first of ``overrides``.
        overrides: ``key=value`` of the kind, such as ``kind=csv`` or ``captions=text``; applied after ``defaults``.
        **defaults: values of keys; those that are None are left out.

    Raises:
        ConfigError: an unknown kind or key, or a wrong value.
        DataError: there is nothing at the path, or its kind is not plain.

    Example:
        >>> parse_source("train.csv", ["captions=text"]).build()
    """
    paths = [str(path)] if isinstance(path, (str, Path)) else list(map(str, path))
    if len(paths) == 1 and re.match(r"[a-z_]+=", paths[0]) and not Path(paths[0]).exists():
        paths, overrides = [], [*paths, *overrides]
    values = {key: value for key, value in defaults.items() if value is not None}
    if paths:
        values["path"] = paths[0] if len(paths) == 1 else paths
    kinds = [text.strip().removeprefix("kind=") for text in overrides if text.strip().startswith("kind=")]
    kind = kinds[-1] if kinds else values.get("kind")
    if kind is None and not paths:
        raise ConfigError(
            f"got {' '.join(overrides) or 'nothing'}; expected a path, or kind=KIND and the keys of the kind"
        )
    if kind is None:
        kind = find_kind(paths, KINDS)
    return parse_config(
        _class_of(kind), {**values, "kind": kind}, overrides, " ".join(map(display_url, paths)) or f"kind {kind}"
    )


def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a source of any kind: pydantic's validator of `vqclip.data.SourceConfig`.

    Raises:
        ValueError: an unknown kind, or none where it is not plain from the path.
    """
    if isinstance(value, SourceConfigBase) and value.kind not in KINDS:
        return value
    if not isinstance(value, Mapping):
        return handler(value)
    kind = value.get("kind")
    if kind is None and isinstance(value.get("path"), (str, Path, list, tuple)):
        path = value["path"]
        kind = find_kind([*map(str, path if isinstance(path, (list, tuple)) else [path])], KINDS)
        value = {**value, "kind": kind}
    if kind is None or (isinstance(kind, str) and kind in KINDS):
        return handler(value)
    return parse_config(_class_of(kind), value, (), f"kind {kind}")


SourceConfig = Annotated[SerializeAsAny[Annotated[_Known, Discriminator("kind")]], WrapValidator(_validate)]
"""Configuration of a source of any kind, of this package or of another one; the kind may be left out."""


def _class_of(kind: object) -> type[SourceConfigBase]:
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    others = installed_kinds()
    if isinstance(kind, str) and kind in others:
        return load_kind(kind)
    close = did_you_mean(difflib.get_close_matches(str(kind)[:80], [*KINDS, *others], n=1))
    more = f"; from installed packages: {', '.join(sorted(others))}" if others else "; no installed package adds others"
    raise ConfigError(f"kind: got {kind!r}; expected one of {', '.join(KINDS)}{more}{close}")
