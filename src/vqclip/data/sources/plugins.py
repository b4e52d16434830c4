"""Kinds of sources that other installed packages add, as entry points of the group ``vqclip.sources``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from vqclip.data.sources.base import SourceConfigBase
from vqclip.errors import ConfigError

__all__ = ["GROUP", "installed_kinds", "load_kind"]

GROUP = "vqclip.sources"


def installed_kinds() -> dict[str, EntryPoint]:
    """Return the kinds of other packages by name; none of them is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load_kind(kind: str) -> type[SourceConfigBase]:
    """Import the config class of a kind of another package.

    Raises:
        ConfigError: no installed package has this kind, it cannot be imported, or is no config class of this kind.
    """
    points = [point for point in entry_points(group=GROUP) if point.name == kind]
    where = ", ".join(f"{point.value} of {_package(point)}" for point in points)
    if len(points) != 1:
        raise ConfigError(f"kind {kind!r}: got {where or 'no installed package with it'}; expected one package")
    try:
        found = points[0].load()
    except (Exception, SystemExit) as error:  # the code of another package may raise anything
        raise ConfigError(f"kind {kind!r}: {where} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SourceConfigBase)):
        raise ConfigError(f"kind {kind!r}: {where} is not a subclass of vqclip.data.SourceConfigBase")
    if found.model_fields["kind"].default != kind:
        raise ConfigError(f'kind {kind!r}: {where} has another one; expected kind: Literal["{kind}"] = "{kind}"')
    if found.build is SourceConfigBase.build:
        raise ConfigError(f"kind {kind!r}: {where} has no method build(cache), which opens the data; add one")
    return found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
