"""Parts of a configuration, as pages show them: each must fit into a whole one."""

from pathlib import Path
from typing import Any

import yaml

from tests.docs.blocks import ROOT
from vqclip.errors import ConfigError
from vqclip.train import TrainConfig
from vqclip.train.tasks.kinds import load_task_config


def check_fragment(source: str, place: Path) -> None:
    """Read a fragment as part of ``configs/base.yaml``, or of ``configs/pixels.yaml`` if it has keys of that task.

    Its sections replace those of the same name; where that leaves one incomplete, as with a quantizer alone, its keys
    are put into the section that stands there.

    Raises:
        ConfigError: it fits neither way.
    """
    fragment = yaml.safe_load(source)
    of_pixels = fragment.keys() - TrainConfig.model_fields.keys() or fragment.get("task") == "pixels"
    base = yaml.safe_load((ROOT / "configs" / ("pixels.yaml" if of_pixels else "base.yaml")).read_text())
    try:
        _load(base | fragment, place)
    except ConfigError:
        _load(_put_into(base, fragment), place)


def _load(tree: dict[str, Any], place: Path) -> None:
    file = place / "fragment.yaml"
    file.write_text(yaml.safe_dump(tree))
    load_task_config(file)


def _put_into(old: Any, new: Any) -> Any:
    """Mappings are merged, unless they are of different kinds; all else is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict) or new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    return old | {key: _put_into(old.get(key), value) for key, value in new.items()}
