"""open_clip's models as towers: both halves, their creation, and a record of what was taken from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names, nonfinite_names
from vqclip.nn.temperature import StartTemperature
from vqclip.towers.base import TowerConfig, set_training
from vqclip.towers.image import ImageTower, Normalize, TimmFeatures, unknown_model_error
from vqclip.towers.text import OpenCLIPTextTower, TextTower
from vqclip.towers.vocabulary import BPE
from vqclip.towers.weights import explain, read_state, require_plain_size

_FAILURES = (
    *(RuntimeError, OSError, ValueError, ImportError, UnpicklingError, SafetensorError, BadZipFile),
    *(AssertionError, AttributeError, EOFError, LookupError, StopIteration, TypeError),  # from files of other content
)


class OpenCLIPConfig(Config):
    """An open_clip model, for both towers."""

    kind: Literal["open_clip"] = "open_clip"
    model: str
    """Name of the open_clip model, such as `ViT-B-16`."""
    pretrained: str | None = None
    """Tag of pretrained weights (`open_clip.list_pretrained()`) or the path of a local file; null: random weights."""


class OpenCLIPTowerConfig(OpenCLIPConfig, TowerConfig):
    """Common keys of the two halves."""

    random_weights: ClassVar[dict[str, Any]] = {"pretrained": None}
    """Settings to change to build the same network without pretrained weights."""


class OpenCLIPImageTowerConfig(OpenCLIPTowerConfig):
    """The vision half of an open_clip model."""

    @torch.inference_mode(False)  # weights made in inference mode could neither be probed nor trained
    def build(self) -> ImageTower:
        """Make the tower.

        Raises:
            ConfigError: unknown model or tag, or a vision half that does not return features of patches.
        """
        clip = create_open_clip(self.model, self.pretrained)
        visual = clip.visual
        size = visual.image_size[0] if isinstance(visual.image_size, tuple) else visual.image_size
        mean, std = visual.preprocess_cfg["mean"], visual.preprocess_cfg["std"]
        try:
            tower = ImageTower(self._backbone(visual), Normalize(int(size), mean, std))
        except ConfigError:
            raise
        except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError, LookupError) as error:
            raise ConfigError(
                f"tower.model: the vision half of {self.model!r} does not give features of patches "
                f"({type(error).__name__}: {error}); expected open_clip's own ViT without attentional pooling, or a "
                "timm model (such as ViT-B-16)"
            ) from error
        return set_training(tower, self.train)

    def _backbone(self, visual: Any) -> nn.Module:
        if hasattr(visual, "trunk"):
            return TimmFeatures(visual.trunk)
        if hasattr(visual, "attnpool") and hasattr(visual, "layer4"):
            return _ResNetFeatures(visual)
        if not hasattr(visual, "prune_intermediate_layers"):
            raise ConfigError(
                f"tower.model: the vision half of {self.model!r} is a {type(visual).__name__}, which does not give "
                "features of patches; expected open_clip's own ViT or a timm model (such as ViT-B-16)"
            )
        return _OpenCLIPFeatures(visual)


class _OpenCLIPFeatures(nn.Module):
    """The last patch features of open_clip's own ViT as ``(B, N, D)``."""

    def __init__(self, visual: nn.Module):
        super().__init__()
        self.visual = visual
        visual.prune_intermediate_layers(1, prune_norm=False, prune_head=True)  # type: ignore[operator]

    def forward(self, pixels: Tensor) -> Tensor:
        out = self.visual.forward_intermediates(  # type: ignore[operator]
            pixels, indices=1, normalize_intermediates=True, intermediates_only=True, output_fmt="NLC"
        )
        return out["image_intermediates"][-1]


class _ResNetFeatures(nn.Module):
    """The last feature map of open_clip's own ResNet as ``(B, N, D)``, without its pooling by attention."""

    def __init__(self, visual: nn.Module):
        super().__init__()
        self.visual = visual
        visual.attnpool = nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.visual(pixels).flatten(2).transpose(1, 2)


class OpenCLIPTextTowerConfig(OpenCLIPTowerConfig):
    """The text half of an open_clip model."""

    def build(self) -> TextTower:
        """Make the tower.

        Raises:
            ConfigError: unknown model or tag, or a text half that is not open_clip's own transformer.
        """
        from open_clip.transformer import TextTransformer

        text = create_open_clip(self.model, self.pretrained).text
        if not isinstance(text, TextTransformer) or text.cls_emb is not None or text.vocab_size != BPE.size:
            raise ConfigError(
                f"tower.model: the text half of {self.model!r} is a {type(text).__name__} with another vocabulary or a "
                "class token; expected open_clip's own text transformer over its byte pairs (such as ViT-B-16)"
            )
        return set_training(OpenCLIPTextTower(text), self.train)

    def vocabulary(self) -> BPE:
        """Return the vocabulary that maps captions to this tower's token numbers."""
        import open_clip

        config = open_clip.get_model_config(self.model) or {}
        return BPE(int(config.get("text_cfg", {}).get("context_length", 77)))


_Shared = dict[tuple[str, str | None], tuple[Any, dict[str, Tensor]]]
"""By name and pretrained weights: a model, and all its tensors, before towers removed what they do not use."""
_SHARED: ContextVar[_Shared | None] = ContextVar("shared open_clip models", default=None)


@contextmanager
def share_models() -> Iterator[_Shared]:
    """Make each open_clip model once in the block, so that both towers take their halves of the same one."""
    shared: _Shared = {}
    token = _SHARED.set(shared)
    try:
        yield shared
    finally:
        _SHARED.reset(token)


def create_open_clip(model: str, pretrained: str | None) -> Any:
    """Make an open_clip model with separate halves ``.visual`` and ``.text``; in `share_models`, return the same again.

    Args:
        model: name of an open_clip model configuration.
        pretrained: tag of pretrained weights, path of a local file, or None for random weights.

    Raises:
        ConfigError: a model or tag that open_clip does not know, or weights that cannot be loaded.
    """
    shared, key = _SHARED.get(), (model, pretrained)
    if shared is None:
        return _create(model, pretrained)
    if key not in shared:
        made = _create(model, pretrained)
        shared[key] = made, dict(made.state_dict(keep_vars=True))
    return shared[key][0]


def _create(model: str, pretrained: str | None) -> Any:
    import open_clip

    # Only names of this list: open_clip also accepts "local-dir:..." and "hf-hub:...", which would download weights.
    if model not in open_clip.list_models():
        raise unknown_model_error("tower.model", "open_clip", model, open_clip.list_models())
    config = open_clip.get_model_config(model)
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained is not None and pretrained not in tags and not Path(pretrained).is_file():
        raise ConfigError(
            f"tower.pretrained: got {pretrained!r}, which is neither a file nor one of the tags of {model}: "
            f"{', '.join(tags) or 'none'}"
        )
    if pretrained in tags:
        activation = bool(open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False))
        if activation != bool(config.get("quick_gelu", False)):
            raise ConfigError(
                f"tower.pretrained: the weights {pretrained!r} were trained {'with' if activation else 'without'} "
                f"QuickGELU, {model} is built {'without' if activation else 'with'} it; expected "
                f"{model + '-quickgelu' if activation else model.removesuffix('-quickgelu')} as the model"
            )
    with TemporaryDirectory(prefix="vqclip-weights-") as folder:
        source = pretrained
        if pretrained is not None and pretrained not in tags and not pretrained.endswith((".npz", ".npy")):
            state, prefix = read_state(Path(pretrained), "tower.pretrained")
            if prefix or not pretrained.endswith(".safetensors"):  # open_clip knows fewer layouts
                torch.save(state, source := f"{folder}/weights.pt")
        try:
            if source is not None and source.endswith(".npz"):
                require_plain_size(Path(source))
            made = open_clip.create_model(
                model,
                pretrained=source,
                device=torch.get_default_device(),  # `meta` for the shapes alone, as for a plan
                force_custom_text=True,
                weights_only=True,
                pretrained_text=False,
            )
        except _FAILURES as error:
            if pretrained is None:
                raise ConfigError(
                    f"tower.model: open_clip cannot make {model}: {type(error).__name__}: {error}; a model of "
                    "open_clip's own parts, such as ViT-B-16, needs neither the network nor other packages"
                ) from error
            raise ConfigError(
                f"tower.pretrained: {pretrained!r} cannot be loaded as weights of {model}: {explain(error)}; expected "
                "a state dict of this model, saved by torch or safetensors"
            ) from error
    if pretrained is not None and (bad := nonfinite_names(made.state_dict())):
        raise ConfigError(
            f"tower.pretrained: the weights {pretrained!r} contain NaN or infinity: {first_names(bad)}; expected an "
            "intact copy of them"
        )
    return made


def describe_inherited(
    source: str, tensors: Mapping[str, Tensor], towers: Iterable[nn.Module], start: StartTemperature
) -> str:
    """Describe in a few lines what a model has taken from an open_clip checkpoint, and what not.

    Weights that do not affect the features of a tower count as not taken.

    Args:
        source: name of the open_clip model and of its pretrained weights.
        tensors: its tensors, by open_clip's names.
        towers: towers that may have some of them.
        start: initial temperature, perhaps that of the checkpoint.
    """
    used: set[int] = set()
    for tower in towers:
        unused = set(getattr(tower, "unused", ()))
        used |= {id(tensor) for name, tensor in tower.state_dict(keep_vars=True).items() if name not in unused}
    left = [name for name, tensor in tensors.items() if name not in start.taken and id(tensor) not in used]
    lines = [f"model.towers: took {len(tensors) - len(left)} tensors of {source}"]
    if left:
        lines.append(f"model.towers: did not take {len(left)} tensors: {first_names(left, 20)}")
    return "\n".join((*lines, *start.notes))
