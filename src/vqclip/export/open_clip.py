"""Write the towers of a vqclip model back into the open_clip checkpoint that they came from.

    export_towers("runs/base/tokenizer", "laion2b_s34b_b88k", Path("out"))

Projections, pooling and temperature of the checkpoint stay; what vqclip adds to a tower has no place in it.
`vqclip.integrations.open_clip` gives a whole vqclip model the methods of an open_clip model. Towers that were not
trained give the checkpoint's embeddings again. Towers that were trained have drifted from the old projections, which
vqclip's losses do not see: such a model is a start for fine-tuning in open_clip, or a source of features, rather than a
finished CLIP.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.io.atomic import replace_folder, require_replaceable
from vqclip.io.tensors import save_tensors, shape_differences
from vqclip.model import CLIP
from vqclip.towers.open_clip import create_open_clip

CONFIG_FILE = "open_clip_config.json"
"""Name of open_clip's configuration in a folder."""
WEIGHTS_FILE = "open_clip_model.safetensors"
"""Name of the weights in a folder, the first that open_clip looks for."""
_IMAGE_PREFIXES = {"backbone.visual.": "visual.", "backbone.model.": "visual.trunk."}
_TEXT_PREFIXES = {"transformer.": "text."}
_PREPROCESS = ("mean", "std", "interpolation", "resize_mode")


def export_towers(folder: str | Path, base: str, out: Path) -> tuple[list[str], list[str]]:
    """Write the towers of a vqclip folder into the open_clip model that they came from.

    Args:
        folder: folder that `CLIP.save_pretrained` or a run wrote; both towers are those of one open_clip model.
        base: tag or file of the pretrained weights that the towers started from.
        out: folder to write: ``open_clip_config.json`` and ``open_clip_model.safetensors``, loaded by open_clip as
            ``local-dir:FOLDER``.

    Returns:
        Names, in open_clip, of the tensors of the vqclip towers, and of those of the base checkpoint: projections,
        pooling, heads, temperature.

    Raises:
        CheckpointError: ``folder`` is missing or damaged, or contains only one modality.
        ConfigError: its towers are not those of one open_clip model, ``base`` does not fit, or ``out`` contains other
            files.
    """
    import open_clip

    require_replaceable(out, CONFIG_FILE, WEIGHTS_FILE)
    clip = CLIP.from_pretrained(folder)
    sections: dict[str, Any] = {"image": clip.config.image.tower, "text": clip.config.text.tower}
    found = {name: f"{tower.kind} {getattr(tower, 'model', '')}".strip() for name, tower in sections.items()}
    if any(tower.kind != "open_clip" for tower in sections.values()) or found["image"] != found["text"]:
        raise ConfigError(
            f"{folder}: got the towers {found['image']} and {found['text']}; expected both of one open_clip model "
            "(model.towers: {kind: open_clip, ...}). open_clip has no place for other towers, nor for what vqclip adds "
            "to them; vqclip.integrations.open_clip.load gives any folder the methods of an open_clip model"
        )
    name = str(sections["image"].model)
    try:
        model = create_open_clip(name, base)
    except ConfigError as error:
        raise ConfigError(f"--base: {str(error).removeprefix('tower.pretrained: ')}") from error
    towers = _rename(clip.image.tower, _IMAGE_PREFIXES) | _rename(clip.text.tower, _TEXT_PREFIXES)
    state = model.state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in towers.items()}
    expected = {key: tuple(state[key].shape) for key in shapes if key in state}
    if problems := shape_differences(expected, shapes):
        raise ConfigError(f"{folder}: its towers do not fit {name}: {'; '.join(problems[:5])}")
    config = deepcopy(open_clip.get_model_config(name))
    state |= towers
    if not (config.get("custom_text") or "hf_model_name" in config["text_cfg"]):
        state = {key.removeprefix("text."): tensor for key, tensor in state.items()}  # as open_clip.CLIP names them

    def fill(aside: Path) -> None:
        preprocess = {key: value for key, value in model.visual.preprocess_cfg.items() if key in _PREPROCESS}
        (aside / CONFIG_FILE).write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}, indent=2))
        save_tensors({key: each.detach().contiguous().clone() for key, each in state.items()}, aside / WEIGHTS_FILE)

    replace_folder(out, fill)
    return list(towers), [key for key in model.state_dict() if key not in towers]


def _rename(tower: nn.Module, prefixes: dict[str, str]) -> dict[str, Tensor]:
    """Return a tower's tensors under open_clip's names."""
    renamed = {}
    for name, tensor in tower.state_dict().items():
        for own, theirs in prefixes.items():
            if name.startswith(own):
                renamed[theirs + name.removeprefix(own)] = tensor
    assert len(renamed) == len(tower.state_dict())
    return renamed
