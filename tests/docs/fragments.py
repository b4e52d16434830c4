"""Parts of a configuration, as pages show them: each must fit into a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.docs.blocks import ROOT
from vqclip.config import load_config
from vqclip.errors import ConfigError
from vqclip.train import TrainConfig


def check_fragment(source: str, place: Path) -> None:
    """Read a fragment as part of ``configs/base.yaml``.

    Its sections replace those of the same name; where that leaves one incomplete, as with a quantizer alone, its keys
    are put into the section that stands there.

    Raises:
        ConfigError: it fits neither way.
    """
    base = yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())
    fragment = yaml.safe_load(source)
    try:
        _load(base | fragment, place)
    except ConfigError:
        _load(_put_into(base, fragment), place)


def _load(tree: dict[str, Any], place: Path) -> None:
    file = place / "fragment.yaml"
    file.write_text(yaml.safe_dump(tree))
    load_config(TrainConfig, file)


def _put_into(old: Any, new: Any) -> Any:
    """Mappings are merged, unless they are of different kinds; all else is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict) or new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    return old | {key: _put_into(old.get(key), value) for key, value in new.items()}
