"""Text towers of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names
from vqclip.towers.base import freeze_unused
from vqclip.towers.huggingface.folder import VOCABULARY_FILE, EncoderFolder, find_folder
from vqclip.towers.huggingface.network import build_network, network_settings
from vqclip.towers.huggingface.vocabulary import FastVocabulary
from vqclip.towers.packages import unpack_minilm
from vqclip.towers.text import TextTower, attendable
from vqclip.towers.training import TowerConfig, set_training
from vqclip.towers.vocabulary import MAX_CONTEXT

_DEFAULT_CONTEXT = 77
"""Context length of CLIP, for folders without one of their own."""
_CAUSAL = ("clip_text_model",)
"""Model types whose tokens see earlier ones only, so that they need no mask of the padding after them."""


class TransformersText:
    """Runs an encoder of transformers.

    Args:
        width: D, features per token.
        pad: token number that padding gets.
        causal: a token sees only earlier ones.
    """

    sees_padding = False

    def __init__(self, width: int, pad: int, causal: bool):
        self.width, self.pad, self.causal = width, pad, causal

    def features(self, network: Any, tokens: Tensor, real: Tensor) -> Tensor:
        """Run the encoder without its pooling.

        transformers leaves out a mask without padding, and attention without a mask takes another kernel on a GPU, so
        that the bits of a caption would depend on the others of its batch. A last column of padding avoids this.
        """
        numbers = torch.where(real, tokens, self.pad)
        if self.causal:
            return network(input_ids=numbers, return_dict=True).last_hidden_state
        numbers = F.pad(numbers, (0, 1), value=self.pad)
        visible = F.pad(attendable(real), (0, 1), value=False)
        return network(input_ids=numbers, attention_mask=visible.long(), return_dict=True).last_hidden_state[:, :-1]


class TransformersTextTowerConfig(TowerConfig):
    """A text encoder of transformers with its own vocabulary (extra ``transformers``)."""

    random_weights: ClassVar[dict[str, Any]] = {"name": None, "revision": None, "package": None, "pretrained": False}
    """Settings to change to build the same network without pretrained weights, once `resolve` has filled the others."""

    kind: Literal["transformers"] = "transformers"
    name: str | None = None
    """Folder that transformers or sentence-transformers wrote, or name ``owner/name`` of a model on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null for the newest."""
    package: Literal["minilm-l6"] | None = None
    """In place of `name`: a small model that comes as a Python package (extra ``small-towers``)."""
    pretrained: bool = True
    """Load the weights (model.safetensors); false: random weights of the same network."""
    context_length: int | None = Field(None, ge=4, le=MAX_CONTEXT)
    """Token positions per caption, marks included; longer captions are cut. Null: max_seq_length of a
    sentence-transformers folder, else 77."""
    dropout: bool = False
    """Keep the network's dropout in training. It depends on the number of processes."""
    network: dict[str, Any] | None = None
    """The network's own settings (config.json of transformers); set in tokenizer folders, in place of `name`."""

    _vocabulary: bytes | None = PrivateAttr(None)
    _shapes: dict[str, tuple[int, ...]] | None = PrivateAttr(None)

    @property
    def is_pretrained(self) -> bool:
        """Return whether the tower starts from weights that were trained before."""
        return self.pretrained

    @model_validator(mode="after")
    def _one_source(self) -> TransformersTextTowerConfig:
        given = [key for key in ("name", "package", "network") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"got {' and '.join(given) or 'neither name nor package'}; expected one of name, package")
        if self.network is not None and self.pretrained:
            raise ValueError("got network with pretrained true, which has no weights; expected pretrained false")
        return self

    def resolve(self) -> TransformersTextTowerConfig:
        """Return a copy with the network's settings, the context length and the vocabulary read from the folder.

        Raises:
            ConfigError: a folder that is missing or incomplete, or a model other than an encoder of text.
        """
        if self._vocabulary is not None and self.network is not None:
            return self
        if self.name is None and self.package is None:
            raise ConfigError(
                f"tower.network: got it without a folder's {VOCABULARY_FILE}; expected name or package beside kind"
            )
        folder = self._folder()
        length = self.context_length or min(folder.max_seq_length() or _DEFAULT_CONTEXT, MAX_CONTEXT)
        settings = network_settings(folder.network(), "text")
        found = self.model_copy(update={"network": settings, "context_length": length})
        found._vocabulary = folder.vocabulary()
        return found

    def with_stored(
        self, files: Mapping[str, bytes], shapes: Mapping[str, tuple[int, ...]]
    ) -> TransformersTextTowerConfig:
        """Return a copy for a tokenizer folder, with its files and the shapes of the tower's weights.

        Raises:
            ConfigError: the vocabulary is missing.
        """
        if VOCABULARY_FILE not in files or self.network is None or self.context_length is None:
            raise ConfigError(f"tower: expected network, context_length and the file {VOCABULARY_FILE} in this folder")
        found = self.model_copy(update={"network": network_settings(self.network, "text")})
        found._vocabulary = files[VOCABULARY_FILE]
        prefix = "transformer."
        found._shapes = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        return found

    def vocabulary(self) -> FastVocabulary:
        """Return the vocabulary that maps captions to this tower's token numbers."""
        resolved = self.resolve()
        assert resolved._vocabulary is not None
        assert resolved.context_length is not None
        return FastVocabulary(resolved._vocabulary, resolved.context_length)

    @torch.inference_mode(False)  # weights made in inference mode could neither be probed nor trained
    def build(self) -> TextTower:
        """Make the tower.

        Raises:
            ConfigError: a folder that is missing or incomplete, a model other than an encoder of text, too long a
                context, or weights that do not fit.
        """
        resolved = self.resolve()
        vocabulary = resolved.vocabulary()
        settings = resolved.network
        assert settings is not None
        weights = resolved._folder(weights=True).path if resolved.pretrained else None
        network, missing = build_network(settings, "text", weights, dropout=self.dropout, shapes=resolved._shapes)
        table = network.get_input_embeddings()
        if vocabulary.size > table.num_embeddings:
            raise ConfigError(
                f"tower.name: {VOCABULARY_FILE} has {vocabulary.size} tokens, the network {table.num_embeddings}; "
                "expected files of one model"
            )
        pad = settings.get("pad_token_id", network.config.pad_token_id)
        pad = pad if isinstance(pad, int) and 0 <= pad < table.num_embeddings else 0
        runs = TransformersText(_width(network), pad, settings.get("model_type") in _CAUSAL)
        tower = TextTower(network, runs, vocabulary)
        _probe(tower, missing)
        return set_training(tower.train(), self.train)

    def _folder(self, weights: bool = False) -> EncoderFolder:
        if self.package is not None:
            found = EncoderFolder.open(unpack_minilm())
        else:
            assert self.name is not None
            found = EncoderFolder.open(find_folder(self.name, self.revision))
        if weights:
            found.require_weights()
        return found


def _width(network: Any) -> int:
    config = network.config
    return int(getattr(config, "hidden_size", None) or config.d_model)


def _probe(tower: TextTower, missing: list[str]) -> None:
    """Run the tower once: freeze weights that do not affect features, and refuse what a `TextTower` cannot be.

    Raises:
        ConfigError: too many positions, features that depend on padding, or needed weights that the folder lacks.
    """
    tower.eval()
    vocabulary, width = tower.vocabulary, tower.width
    longest = torch.zeros(1, tower.context_length, dtype=torch.int64)
    short = vocabulary(["a b"])
    try:
        with torch.no_grad():
            other = TransformersText(width, 1 if tower.network.pad != 1 else 0, tower.network.causal)  # type: ignore[attr-defined]
            real = tower.mask(short)
            changed = other.features(tower.transformer, short, real)
        with torch.enable_grad():
            unchanged = tower(short)
            features = tower(longest)
    except (IndexError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"tower.context_length: the network cannot read {tower.context_length} tokens (and one of padding): "
            f"{type(error).__name__}: {reason}; expected fewer"
        ) from error
    if features.shape != (1, tower.context_length, width):
        raise ConfigError(
            f"tower.name: the network gives features of shape {tuple(features.shape)}; expected one for each token, "
            f"(1, {tower.context_length}, {width})"
        )
    if not torch.allclose(unchanged[real], changed[real], rtol=1e-3, atol=1e-4):
        raise ConfigError("tower.name: the network's features depend on padding; expected one that masks it")
    tower.unused = freeze_unused(tower, features)
    needed = {name for name, weight in tower.transformer.named_parameters() if weight.requires_grad}
    if lacking := sorted(needed.intersection(missing)):
        raise ConfigError(
            f"tower.name: the weights lack {first_names(lacking)}; expected those of the whole encoder, or pretrained: "
            "false"
        )
