"""Towers of transformers: any encoder that `AutoModel` loads from safetensors, with its own vocabulary.

    folder or hub name ─> config.json (checked), tokenizer.json, preprocessor_config.json ─> network with its weights

`transformers` is imported when a tower is built, and executes no code of a model; see `transformers_folder`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from vqclip.errors import CheckpointError, ConfigError, import_extra
from vqclip.io.files import find_folder, read_bounded
from vqclip.io.json_files import MAX_BYTES
from vqclip.io.tensors import first_names, nonfinite_names, shape_differences
from vqclip.towers.base import TowerConfig, freeze_unused, set_training
from vqclip.towers.image import OPENAI_MEAN, OPENAI_STD, ImageTower, Normalize
from vqclip.towers.text import TextTower, attendable
from vqclip.towers.transformers_folder import (
    CONFIG_FILE,
    Part,
    calls_to_transformers,
    find_class,
    network_settings,
    other_model_error,
    read_settings,
    require_safetensors,
)
from vqclip.towers.vocabulary import MAX_CONTEXT, VOCABULARY_FILE, FastVocabulary
from vqclip.towers.weights import explain, unpack_minilm

_Channels = tuple[float, float, float]
_Shapes = Mapping[str, tuple[int, ...]]

_CAUSAL = ("clip_text_model",)
"""Model types whose tokens see earlier ones only, so that they need no mask of the padding after them."""
_RANDOM = ("dropout", "drop_path", "layerdrop")
"""Parts of the keys of rates at which activations are dropped in training."""
_CALL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
"""Errors of a network that cannot read its input."""
_FETCHED = ("*.json", "*.safetensors")
_NOT_FETCHED = ("onnx/*", "openvino/*", "coreml/*", "*/onnx/*", "*/openvino/*")


class TransformersTowerConfig(TowerConfig):
    """Common keys of the towers of transformers (extra ``transformers``)."""

    part: ClassVar[Part]
    """Input of the network."""
    prefix: ClassVar[str]
    """Beginning of the names of the network's weights in those of the tower."""
    random_weights: ClassVar[dict[str, Any]] = {"name": None, "revision": None, "pretrained": False}
    """Settings to change to build the same network without pretrained weights, once `resolve` has filled the others."""

    kind: Literal["transformers"] = "transformers"
    name: str | None = None
    """Folder that transformers or sentence-transformers wrote, or name ``owner/name`` of a model on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null for the newest."""
    pretrained: bool = True
    """Load the weights (model.safetensors); false: random weights of the same network."""
    dropout: bool = False
    """Keep the network's dropout and stochastic depth in training. They depend on the number of processes."""
    network: dict[str, Any] | None = None
    """The network's own settings (config.json of transformers); set in tokenizer folders, in place of `name`."""

    _shapes: _Shapes | None = PrivateAttr(None)
    """Shapes of the weights that a tokenizer folder has."""

    @property
    def is_pretrained(self) -> bool:
        """Return whether the tower starts from weights that were trained before."""
        return self.pretrained

    @model_validator(mode="after")
    def _one_source(self) -> TransformersTowerConfig:
        sources = [key for key in ("name", "package", "network") if getattr(self, key, None) is not None]
        if len(sources) != 1:
            raise ValueError(f"got {' and '.join(sources) or 'no name'}; expected one: name, or package for texts")
        if self.network is not None and self.pretrained:
            raise ValueError("got network with pretrained true, which has no weights; expected pretrained false")
        return self

    def with_stored(self, files: Mapping[str, bytes], shapes: _Shapes) -> Self:
        """Return a copy for a tokenizer folder, with its files and the shapes of the tower's weights."""
        if self.network is None:
            raise ConfigError("tower.network: missing; expected the network's settings in this folder")
        found = self.model_copy(update={"network": network_settings(self.network, self.part)})
        found._shapes = {name.removeprefix(self.prefix): shape for name, shape in shapes.items()}
        return found

    def _folder(self) -> Path:
        """Return the folder; a model on the hub is fetched into the hub's cache: JSON and safetensors only."""
        package: bool = getattr(self, "package", None) is not None
        try:
            root = find_folder(unpack_minilm() if package else self.name or "", self.revision, _FETCHED, _NOT_FETCHED)
        except CheckpointError as error:
            raise ConfigError(f"tower.name: {error}") from error
        if (root / CONFIG_FILE).is_file():
            return root
        for path in sorted(root.glob(f"0_*/{CONFIG_FILE}")):  # the first module of a folder of sentence-transformers
            return path.parent
        raise ConfigError(
            f"tower.name: {root}: expected {CONFIG_FILE}, model.safetensors and, for text, {VOCABULARY_FILE}; "
            f"got: {first_names(sorted(path.name for path in root.iterdir())) or 'an empty folder'}"
        )

    def _build(self) -> tuple[Any, list[str]]:
        """Make the network of a resolved configuration, in fp32; random weights are drawn from torch's generator.

        Returns:
            The module, and the names of its weights that the folder lacks.
        """
        assert self.network is not None
        transformers = import_extra("transformers", "transformers", "tower.kind: transformers ")
        kind = str(self.network.get("model_type"))
        if kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(
                f"tower.name: transformers {transformers.__version__} has no model type {kind!r}; expected one that it "
                "contains, such as bert or vit: a model's own code is never executed"
            )
        weights, found = self._folder() if self.pretrained else None, dict[str, Any]()
        if weights is not None:
            require_safetensors(weights)
        with calls_to_transformers(kind):
            config = transformers.CONFIG_MAPPING[kind].from_dict(dict(self.network))
            for key, value in config.to_dict().items():
                if not self.dropout and isinstance(value, float) and any(part in key for part in _RANDOM):
                    setattr(config, key, 0.0)
            auto = find_class(transformers, config, self.part)
            if self._shapes is not None:  # compared before memory is taken
                with torch.device("meta"):
                    outline = auto.from_config(config, trust_remote_code=False).state_dict()
                expected = {name: tuple(tensor.shape) for name, tensor in outline.items()}
                if problems := shape_differences(expected, self._shapes):
                    raise ConfigError(f"tower.network: does not fit the weights: {'; '.join(problems[:5])}")
            if weights is None:
                network = auto.from_config(config, trust_remote_code=False)
            else:
                network, found = auto.from_pretrained(
                    weights,
                    config=config,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
        if network.main_input_name != ("input_ids" if self.part == "text" else "pixel_values"):
            raise other_model_error(config, self.part)
        mismatched = sorted(found.get("mismatched_keys", ()))
        problems = [f"{name}: got shape {tuple(got)}, expected {tuple(want)}" for name, got, want in mismatched]
        problems += [str(each) for each in found.get("error_msgs", ())]
        loaded = {} if weights is None else network.state_dict()
        problems += [f"{name}: contains NaN or infinity" for name in nonfinite_names(loaded)]
        if problems:
            raise ConfigError(f"tower.name: the weights in {weights} do not fit: {'; '.join(problems[:5])}")
        return network.float(), sorted(found.get("missing_keys", ()))


class TransformersImageTowerConfig(TransformersTowerConfig):
    """An image encoder of transformers (extra ``transformers``)."""

    part: ClassVar[Part] = "vision"
    prefix: ClassVar[str] = "backbone.network."
    image_size: int | None = Field(None, ge=8, le=4096)
    """Height and width of the input in pixels; null for the network's own. Another size needs a network that
    interpolates its position embeddings, or one without any."""
    mean: _Channels | None = None
    """Mean of the pixels in 0..1 per channel; null for that of preprocessor_config.json."""
    std: _Channels | None = None
    """Deviation of the pixels in 0..1 per channel; null for that of preprocessor_config.json."""

    @model_validator(mode="after")
    def _std_is_positive(self) -> TransformersImageTowerConfig:
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"got std {self.std}; expected numbers above 0")
        return self

    def resolve(self) -> Self:
        """Return a copy with the network's settings, the image size and the normalisation read from the folder."""
        mean, std, settings = self.mean, self.std, self.network
        if settings is None:
            folder = self._folder()
            settings = network_settings(read_settings(folder / CONFIG_FILE) or {}, self.part)
            if self.pretrained and (mean is None or std is None):  # any will do without weights
                found = _read_statistics(folder)
                mean, std = mean or found[0], std or found[1]
        size = self.image_size or _native_size(settings)
        if size is None:
            raise ConfigError("tower.image_size: got null; expected a size, for the network's settings have none")
        update = {"network": settings, "image_size": size, "mean": mean or OPENAI_MEAN, "std": std or OPENAI_STD}
        return self.model_copy(update=update)

    @torch.inference_mode(False)  # weights made in inference mode could neither be probed nor trained
    def build(self) -> ImageTower:
        """Make the tower.

        Raises:
            ConfigError: a folder that is missing or incomplete, a model other than an encoder of images, an image size
                that it cannot read, or weights that do not fit.
        """
        resolved: Any = self.resolve()
        size, native = resolved.image_size, _native_size(resolved.network)
        network, missing = resolved._build()
        try:
            features = TransformersFeatures(network, size, native)
            tower = ImageTower(features, Normalize(size, resolved.mean, resolved.std))
        except ConfigError:
            raise
        except _CALL_ERRORS as error:
            own = f" (its own is {native})" if native else ""
            raise ConfigError(
                f"tower.image_size: the network cannot read images of {size} pixels{own}: {explain(error)}"
            ) from error
        _require_trained(network, missing)
        return set_training(tower, self.train)


class TransformersFeatures(nn.Module):
    """The last features of an encoder of transformers as ``(B, N, D)``, without prefix (class, register) tokens.

    Args:
        network: the encoder.
        image_size: height and width in pixels.
        native_size: size of its position embeddings, if it has one.
    """

    def __init__(self, network: Any, image_size: int, native_size: int | None):
        super().__init__()
        self.network = network
        self.arguments: dict[str, Any] = {"return_dict": True}
        resized = native_size is not None and image_size != native_size
        if resized and "interpolate_pos_encoding" in inspect.signature(network.forward).parameters:
            self.arguments["interpolate_pos_encoding"] = True
        with torch.no_grad():
            out = network.eval()(torch.zeros(1, 3, image_size, image_size), **self.arguments).last_hidden_state
        self.prefix = 0 if out.ndim == 4 else _count_prefix(network.config, out.shape[1], image_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map normalised pixels ``(B, 3, H, W)`` to features ``(B, N, D)``."""
        features: Tensor = self.network(pixels, **self.arguments).last_hidden_state
        return features.flatten(2).transpose(1, 2) if features.ndim == 4 else features[:, self.prefix :]


def _native_size(settings: Mapping[str, Any]) -> int | None:
    size = settings.get("image_size")
    if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
        size = size[0]
    return size if isinstance(size, int) else None


def _read_statistics(folder: Path) -> tuple[_Channels, _Channels]:
    """Return mean and deviation of the pixels in 0..1 that the network was trained on."""
    settings = read_settings(folder / "preprocessor_config.json")
    if settings is None:
        settings = (read_settings(folder / "processor_config.json") or {}).get("image_processor")
    if not isinstance(settings, dict):
        raise ConfigError(
            f"tower.mean: {folder} has no preprocessor_config.json; expected mean and std of the pixels that the "
            "weights were trained on, such as [0.5, 0.5, 0.5]"
        )
    given: dict[str, Any] = {"do_rescale": True, "rescale_factor": 1 / 255} | settings
    if given.get("do_normalize") is False:
        given |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    try:
        read = TypeAdapter(_Channels).validate_python
        mean, std = read(given.get("image_mean")), read(given.get("image_std"))
        is_plain = bool(given["do_rescale"]) and math.isclose(given["rescale_factor"], 1 / 255, rel_tol=1e-3)
    except (ValidationError, TypeError):
        is_plain = False
    if not is_plain or min(std) <= 0 or not all(map(math.isfinite, (*mean, *std))):
        keys = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        raise ConfigError(
            f"tower.mean: preprocessor_config.json in {folder} has { {key: given.get(key) for key in keys} }; expected "
            "pixels scaled by 1/255, and image_mean and image_std of three numbers each, those of image_std above 0; "
            "or mean and std of pixels in 0..1 beside name"
        )
    return mean, std


def _count_prefix(config: Any, tokens: int, image_size: int) -> int:
    """Return the number of class and register tokens before the patches."""
    patch = getattr(config, "patch_size", None)
    side = patch[0] if isinstance(patch, list | tuple) else patch
    if isinstance(side, int) and side > 0:
        extra = tokens - (image_size // side) ** 2
        if extra in (0, 1, 2, 1 + int(getattr(config, "num_register_tokens", 0) or 0)):
            if image_size % side:
                raise ConfigError(
                    f"tower.image_size: got {image_size} with patches of {side} pixels, which would ignore the last "
                    f"{image_size % side} rows and columns; expected a multiple of {side}"
                )
            return extra
    if round(tokens**0.5) ** 2 == tokens and hasattr(config, "depths"):  # stages of windows, as in Swin
        return 0
    raise ConfigError(
        f"tower.name: the network gives {tokens} tokens for {image_size} pixels and patches of {patch}; expected one "
        "for each patch after class and register tokens, or a feature map"
    )


class TransformersTextTowerConfig(TransformersTowerConfig):
    """A text encoder of transformers with its own vocabulary (extra ``transformers``)."""

    part: ClassVar[Part] = "text"
    prefix: ClassVar[str] = "transformer."
    random_weights: ClassVar[dict[str, Any]] = TransformersTowerConfig.random_weights | {"package": None}
    """Settings to change to build the same network without pretrained weights, once `resolve` has filled the others."""

    package: Literal["minilm-l6"] | None = None
    """In place of `name`: a small model that comes as a Python package (extra ``small-towers``)."""
    context_length: int | None = Field(None, ge=4, le=MAX_CONTEXT)
    """Token positions per caption, marks included; longer captions are cut. Null: max_seq_length of a
    sentence-transformers folder, else 77."""

    _vocabulary: bytes | None = PrivateAttr(None)
    """Content of ``tokenizer.json``."""

    def resolve(self) -> Self:
        """Return a copy with the network's settings, the context length and the vocabulary read from the folder."""
        if self.network is not None:
            if self._vocabulary is None:
                raise ConfigError(
                    f"tower.network: got it without a folder's {VOCABULARY_FILE}; expected name or package beside kind"
                )
            return self
        folder = self._folder()
        if not (path := folder / VOCABULARY_FILE).is_file() or path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"tower.name: {folder}: contains no {VOCABULARY_FILE} of at most {MAX_BYTES} bytes, the file of a fast "
                "tokenizer; transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it if "
                "there is one"
            )
        cut = (read_settings(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
        length = self.context_length or min(cut if isinstance(cut, int) else 77, MAX_CONTEXT)
        settings = network_settings(read_settings(folder / CONFIG_FILE) or {}, self.part)
        found = self.model_copy(update={"network": settings, "context_length": length})
        found._vocabulary = read_bounded(path, MAX_BYTES)
        return found

    def with_stored(self, files: Mapping[str, bytes], shapes: _Shapes) -> Self:
        """Return a copy for a tokenizer folder, with its files and the shapes of the tower's weights."""
        if VOCABULARY_FILE not in files or self.context_length is None:
            raise ConfigError(f"tower: expected context_length and the file {VOCABULARY_FILE} in this folder")
        found = super().with_stored(files, shapes)
        found._vocabulary = files[VOCABULARY_FILE]
        return found

    def vocabulary(self) -> FastVocabulary:
        """Return the vocabulary that maps captions to this tower's token numbers."""
        resolved: Any = self.resolve()
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
        network, missing = resolved._build()
        rows, pad = network.get_input_embeddings().num_embeddings, network.config.pad_token_id
        if vocabulary.size > rows:
            raise ConfigError(
                f"tower.name: {VOCABULARY_FILE} has {vocabulary.size} tokens, the network {rows}; expected files of "
                "one model"
            )
        tower = TransformersTextTower(network, vocabulary, pad if isinstance(pad, int) and 0 <= pad < rows else 0)
        tower.unused = freeze_unused(tower, _probe(tower))
        _require_trained(network, missing)
        return set_training(tower.train(), self.train)


class TransformersTextTower(TextTower):
    """A tower of an encoder of transformers.

    Args:
        transformer: the encoder.
        vocabulary: maps captions to its token numbers.
        pad: token number that padding gets.
    """

    def __init__(self, transformer: Any, vocabulary: FastVocabulary, pad: int):
        width = getattr(transformer.config, "hidden_size", None) or transformer.config.d_model
        super().__init__(transformer, int(width), vocabulary)
        self.pad, self.causal = pad, transformer.config.model_type in _CAUSAL

    def features(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Run the encoder without its pooling.

        transformers leaves out a mask without padding, and attention without a mask takes another kernel on a GPU, so
        that the bits of a caption would depend on the others of its batch. A last column of padding avoids this.
        """
        numbers = torch.where(real, tokens, self.pad)
        if self.causal:
            return self.transformer(input_ids=numbers, return_dict=True).last_hidden_state
        numbers = F.pad(numbers, (0, 1), value=self.pad)
        visible = F.pad(attendable(real), (0, 1), value=False).long()
        out = self.transformer(input_ids=numbers, attention_mask=visible, return_dict=True)
        return out.last_hidden_state[:, :-1]


def _probe(tower: TransformersTextTower) -> Tensor:
    """Return the features of the longest caption, with a graph; check that there is one a token, free of padding."""
    tower.eval()
    length, short, pad = tower.context_length, tower.vocabulary(["a b"]), tower.pad
    real = tower.mask(short)
    try:
        with torch.no_grad():
            unchanged = tower(short)
            tower.pad = 1 if pad != 1 else 0
            changed = tower(short)
            tower.pad = pad
        with torch.enable_grad():
            features: Tensor = tower(torch.zeros(1, length, dtype=torch.int64))
    except _CALL_ERRORS as error:
        raise ConfigError(
            f"tower.context_length: the network cannot read {length} tokens (and one of padding): {explain(error)}; "
            "expected fewer"
        ) from error
    if features.shape != (1, length, tower.width):
        raise ConfigError(
            f"tower.name: the network gives features of shape {tuple(features.shape)}; expected one for each token, "
            f"(1, {length}, {tower.width})"
        )
    if not torch.allclose(unchanged[real], changed[real], rtol=1e-3, atol=1e-4):
        raise ConfigError("tower.name: the network's features depend on padding; expected one that masks it")
    return features


def _require_trained(network: nn.Module, missing: list[str]) -> None:
    """Check that the folder has all weights that affect the features; the others are frozen by now."""
    if lacking := [name for name, weight in network.named_parameters() if weight.requires_grad and name in missing]:
        raise ConfigError(
            f"tower.name: the weights lack {first_names(sorted(lacking))}; expected those of the whole encoder, or "
            "pretrained: false"
        )
