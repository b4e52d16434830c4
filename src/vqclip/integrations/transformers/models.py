"""Tokenizer folders as configurations and models of transformers.

Shapes: B samples, N tokens, C codebooks, D width of decoded vectors, E width of the joint embedding.
"""

from __future__ import annotations

import os
import reprlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

import vqclip
from vqclip import dist
from vqclip.errors import CheckpointError, ConfigError, ShapeError
from vqclip.io.json_files import read_json
from vqclip.model import CLIP
from vqclip.nn.precision import full_precision
from vqclip.tokenizer import ImageTokenizer, TextTokenizer, Tokenizer
from vqclip.tokenizer.folder import CONFIG_FILE, VERSIONS, find_folder

FolderModelT = TypeVar("FolderModelT", bound="FolderModel")

_EMBEDDINGS = ("codes_only", "continuous")
_NOT_KEPT = {*VERSIONS, "weights", "files", "pixels", "frozen", "adapters", "sha256"}
"""Keys of ``config.json`` that describe the files of a folder, not the model."""
_WITHOUT_EFFECT = (
    *("_commit_hash", "_from_auto", "_from_pipeline", "adapter_kwargs", "device_map", "dtype", "low_cpu_mem_usage"),
    *("max_shard_size", "proxies", "torch_dtype", "trust_remote_code", "use_fast"),
)
"""Options of transformers that change nothing here, or only models, which name them: no code is fetched, for one."""
_USUAL = {"safe_serialization": True, "use_safetensors": True}
"""Options of which only this value is possible."""


def _init_config(
    self: Any,
    image: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    temperature: dict[str, Any] | None = None,
    embeddings: str = "codes_only",
    **others: Any,
) -> None:
    """Initialise a configuration; only the sections of its class are kept."""
    PretrainedConfig.__init__(self, **{name: value for name, value in others.items() if name not in _NOT_KEPT})
    sections = {"image": image, "text": text, "temperature": temperature}
    for name in self.sections:
        setattr(self, name, sections[name])
    if len(self.sections) > 1:
        self.embeddings = embeddings


# Version 5 of transformers calls the ``__init__`` of a class itself, never an inherited one.
class VqclipImageTokenizerConfig(PretrainedConfig):
    """Configuration of a `VqclipImageTokenizer`.

    Attributes:
        image: the section of the same name in a tokenizer folder's ``config.json``.
    """

    model_type = "vqclip_image_tokenizer"
    sections: ClassVar[tuple[str, ...]] = ("image",)
    __init__ = _init_config


class VqclipTextTokenizerConfig(PretrainedConfig):
    """Configuration of a `VqclipTextTokenizer`.

    Attributes:
        text: the section of the same name in a tokenizer folder's ``config.json``.
    """

    model_type = "vqclip_text_tokenizer"
    sections: ClassVar[tuple[str, ...]] = ("text",)
    __init__ = _init_config


class VqclipConfig(PretrainedConfig):
    """Configuration of a `VqclipModel`.

    Attributes:
        image, text, temperature: the sections of the same names in a tokenizer folder's ``config.json``.
        embeddings: ``codes_only``: images and texts are embedded from their ids alone; ``continuous``: with the
            quantizers bypassed. Not part of a folder.
    """

    model_type = "vqclip"
    sections: ClassVar[tuple[str, ...]] = ("image", "text", "temperature")
    __init__ = _init_config


class FolderModel(PreTrainedModel):
    """A model of transformers around the module that a tokenizer folder contains.

    Weights keep the type in which they were stored, or get float32 or float64: `TokenizerDecoder` refuses others.

    Args:
        config: its configuration.
        stored: the module.

    Raises:
        ConfigError: there is no module, such as from ``AutoModel.from_config``, or its images have any shape.
    """

    base_model_prefix = ""
    stored_name: ClassVar[str]
    """Attribute with the module."""

    def __init__(self, config: Any, stored: Any = None):
        super().__init__(config)
        if stored is None:
            name = type(self).__name__
            raise ConfigError(f"{name}: got a configuration without weights; expected {name}.from_pretrained")
        getattr(stored, "image", stored).require_image_size("a model of transformers")
        setattr(self, self.stored_name, stored)
        self.post_init()

    @classmethod
    @abstractmethod
    def _load(cls, folder: Path) -> Any:
        """Load the module from a folder."""

    def _init_weights(self, module: Any) -> None:
        """Leave the weights as they are."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[FolderModelT],
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        config: PretrainedConfig | None = None,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        **options: Any,
    ) -> FolderModelT:
        """Load from a tokenizer folder, in evaluation mode; every byte is compared with its checksum.

        Args:
            pretrained_model_name_or_path: folder that a run, `vqclip` or ``save_pretrained`` wrote, or a hub name.
            config: configuration of the same folder; its ``embeddings`` are used.
            revision: branch, tag or commit of a hub name.
            dtype: None and ``"auto"`` keep the stored type; float32 and float64 convert, others are refused.
            torch_dtype: former name of ``dtype``.
            device_map: one device for the whole model; ``"auto"``: the GPU, if there is one.
            options: ``embeddings`` of a `VqclipConfig`; options of transformers are refused unless they are None, False
                or have no effect.

        Raises:
            CheckpointError: a folder that is missing or damaged, or lacks this modality.
            ConfigError: an option that has no meaning here, or a type that would change ids.
        """
        folder = local_folder(pretrained_model_name_or_path, revision)
        stored, config_class = cls._load(folder), cls.config_class
        found: Any = config_class(**read_json(folder / CONFIG_FILE)[0])  # type: ignore[misc]
        if config is not None:
            for name in found.sections:
                if getattr(config, name, None) != getattr(found, name):
                    raise CheckpointError(f"config: its section {name} differs from that in {folder / CONFIG_FILE}")
            found = config
        if "embeddings" in options and hasattr(found, "embeddings"):
            found.embeddings = options.pop("embeddings")
        require_no_options(f"{cls.__name__}.from_pretrained", options)
        found.name_or_path, found.architectures = str(pretrained_model_name_or_path), [cls.__name__]
        model: Any = cls(found, stored)
        if (wanted := dtype if dtype is not None else torch_dtype) not in (None, "auto"):
            kind = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
            if not isinstance(kind, torch.dtype):
                raise ConfigError(f"dtype: got {wanted!r}, expected a torch.dtype such as torch.float32, or auto")
            model.to(kind)
        found.dtype = model.dtype
        if isinstance(device_map, dict) and set(device_map) == {""}:
            device_map = device_map[""]
        if device_map is not None:
            name = str(device_map) if isinstance(device_map, torch.device) else device_map
            model.to(dist.choose_device(name, "device_map"))
        loaded: FolderModelT = model.eval()
        return loaded

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, **options: Any
    ) -> None:
        """Write a tokenizer folder: for this class, the Auto classes and `vqclip.load_tokenizer`.

        Args:
            save_directory: the folder; a tokenizer in it is replaced atomically.
            is_main_process: False writes nothing.
            options: options of transformers without an effect; others are refused.

        Raises:
            ConfigError: an option that has no meaning here, or a folder with other files, which would be lost.
        """
        require_no_options(f"{type(self).__name__}.save_pretrained", options)
        if is_main_process:
            getattr(self, self.stored_name).save_pretrained(save_directory)

    def push_to_hub(  # type: ignore[override]
        self, repo_id: str, card: str | None = None, *, revision: str | None = None, **options: Any
    ) -> str:
        """Save this model, push it to the hub with a card, and return the commit's address.

        Arguments are those of `Tokenizer.push_to_hub`; options of transformers are refused.
        """
        private = options.pop("private", None)
        require_no_options(f"{type(self).__name__}.push_to_hub", options)
        stored = getattr(self, self.stored_name)
        address: str = stored.push_to_hub(repo_id, card, private=private, revision=revision)
        return address


def local_folder(name: str | os.PathLike[str], revision: str | None) -> Path:
    """Return a local folder or fetch one; transformers gives local folders the revision "main"."""
    return find_folder(os.fspath(name), None if revision is not None and str(revision) == "main" else revision)


def require_no_options(function: str, options: Mapping[str, Any]) -> None:
    """Refuse options that would change something in transformers and are not supported; raise ConfigError."""
    strange = {
        name: value
        for name, value in options.items()
        if value is not None and name not in _WITHOUT_EFFECT and value != _USUAL.get(name)
        if value is not False or name.startswith("do_")
    }
    if strange:
        shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in strange.items())  # images are long
        raise ConfigError(
            f"{function}: got {shown}; expected none of these. Set HF_TOKEN, HF_HOME or HF_HUB_OFFLINE in the "
            "environment for access to the hub"
        )


@dataclass
class VqclipImageTokenizerOutput(ModelOutput):
    """Codes of images, and what was asked for beside them."""

    image_codes: Tensor | None = None
    """``(B, N, C)`` int64."""
    image_embeds: Tensor | None = None
    """``(B, E)`` unit-norm, from the codes alone; only from ``forward``."""


@dataclass
class VqclipTextTokenizerOutput(ModelOutput):
    """Codes of captions, and what was asked for beside them."""

    text_codes: Tensor | None = None
    """``(B, N, C)`` int64, -1 at padding."""
    text_embeds: Tensor | None = None
    """``(B, E)`` unit-norm, from the codes alone; only from ``forward``."""


class _TokenizerModel(FolderModel):
    """Common part: everything that starts from codes."""

    stored_name = "tokenizer"
    modality: ClassVar[str]
    tokenizer: Tokenizer

    @classmethod
    def _load(cls, folder: Path) -> Tokenizer:
        load: Any = vqclip.load_tokenizer
        return load(folder, cls.modality)

    @property
    def num_tokens(self) -> int:
        """N, tokens a sample."""
        return self.tokenizer.num_tokens

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """K of each of the C codebooks."""
        return self.tokenizer.codebook_sizes

    def decode(self, codes: Tensor) -> Tensor:
        """Map codes ``(B, N, C)`` to vectors ``(B, N, D)`` for a downstream model; see `Tokenizer.decode`."""
        return self.tokenizer.decode(codes)

    def embed(self, codes: Tensor) -> Tensor:
        """Map codes ``(B, N, C)`` to the joint embedding ``(B, E)``, unit-norm; see `Tokenizer.embed`."""
        return self.tokenizer.embed(codes)

    def tokens_to_codes(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """Map ids of a language model ``(B, N·C)`` back to codes ``(B, N, C)``; see `Tokenizer.from_vocabulary`."""
        return self.tokenizer.from_vocabulary(tokens, offset)


class VqclipImageTokenizer(_TokenizerModel):
    """Images → codes → vectors and embeddings: `vqclip.tokenizer.ImageTokenizer` as a model of transformers.

    ``pixel_values`` are ``(B, 3, H, W)``, uint8 (0..255, as the processor makes them) or float (0..1).
    """

    config_class = VqclipImageTokenizerConfig
    main_input_name = "pixel_values"
    modality = "image"
    tokenizer: ImageTokenizer

    def encode(self, pixel_values: Tensor) -> VqclipImageTokenizerOutput:
        """Encode images; raise ShapeError for another shape, dtype or range."""
        return VqclipImageTokenizerOutput(image_codes=self.tokenizer.encode(require_pixels(pixel_values)))

    def get_image_tokens(self, pixel_values: Tensor, offset: int = 0) -> Tensor:
        """Encode images to ids of a language model ``(B, N·C)``, each codebook in a range of its own from ``offset``.

        Args:
            pixel_values: see the class.
            offset: id of the first code, such as the size of the language model's vocabulary.
        """
        return self.tokenizer.to_vocabulary(self.tokenizer.encode(require_pixels(pixel_values)), offset)

    def decode_pixels(
        self, codes: Tensor, stages: int | None = None, codebooks: int | None = None, detail: int | None = None
    ) -> Tensor:
        """Map codes ``(B, N, C)`` to images ``(B, 3, H, W)`` in 0..1; see `TokenizerDecoder.decode_pixels`."""
        return self.tokenizer.decode_pixels(codes, stages, codebooks, detail)

    def forward(self, pixel_values: Tensor) -> VqclipImageTokenizerOutput:
        """Encode images, and embed their codes."""
        codes = self.tokenizer.encode(require_pixels(pixel_values))
        return VqclipImageTokenizerOutput(image_codes=codes, image_embeds=self.tokenizer.embed(codes))


class VqclipTextTokenizer(_TokenizerModel):
    """Captions → codes → vectors and embeddings: `vqclip.tokenizer.TextTokenizer` as a model of transformers.

    ``input_ids`` ``(B, N)`` int64 are those of `VqclipVocabulary`; an ``attention_mask`` ``(B, N)`` is only compared
    with the padding that the rows have themselves.
    """

    config_class = VqclipTextTokenizerConfig
    main_input_name = "input_ids"
    modality = "text"
    tokenizer: TextTokenizer

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> VqclipTextTokenizerOutput:
        """Encode captions; raise ShapeError for other rows than the vocabulary makes, or a mask that does not fit."""
        return VqclipTextTokenizerOutput(text_codes=self._codes(input_ids, attention_mask))

    def get_text_tokens(self, input_ids: Tensor, attention_mask: Tensor | None = None, offset: int = 0) -> Tensor:
        """Encode captions to ids of a language model ``(B, N·C)`` from ``offset`` on, -1 at padding."""
        return self.tokenizer.to_vocabulary(self._codes(input_ids, attention_mask), offset)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> VqclipTextTokenizerOutput:
        """Encode captions, and embed their codes."""
        codes = self._codes(input_ids, attention_mask)
        return VqclipTextTokenizerOutput(text_codes=codes, text_embeds=self.tokenizer.embed(codes))

    def _codes(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.tokenizer.encode(require_tokens(self.tokenizer, input_ids, attention_mask))


@dataclass
class VqclipOutput(ModelOutput):
    """Similarities of images and texts, and their embeddings."""

    logits_per_image: Tensor | None = None
    """``(images, texts)``: scale times cosine, plus the bias if there is one."""
    logits_per_text: Tensor | None = None
    """``(texts, images)``, its transpose."""
    image_embeds: Tensor | None = None
    """``(images, E)`` unit-norm."""
    text_embeds: Tensor | None = None
    """``(texts, E)`` unit-norm."""


class VqclipModel(FolderModel):
    """`vqclip.CLIP` as a model of transformers, for pipelines of zero-shot image classification.

    Inputs are those of `VqclipImageTokenizer` and `VqclipTextTokenizer`.

    Raises:
        ConfigError: unknown ``config.embeddings``, or ``codes_only`` of a tokenizer without codes.
    """

    config_class = VqclipConfig
    main_input_name = "pixel_values"
    stored_name = "clip"
    clip: CLIP

    def __init__(self, config: VqclipConfig, stored: CLIP | None = None):
        super().__init__(config, stored)
        embeddings: str = config.embeddings
        if embeddings not in _EMBEDDINGS:
            raise ConfigError(f"embeddings: got {embeddings!r}, expected one of {', '.join(_EMBEDDINGS)}")
        if embeddings == "codes_only":
            self.clip.image.require_codes("embeddings: got 'codes_only', but")
            self.clip.text.require_codes("embeddings: got 'codes_only', but")

    @classmethod
    def _load(cls, folder: Path) -> CLIP:
        return CLIP.from_pretrained(folder)

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Embed images ``(B, 3, H, W)`` as ``(B, E)`` unit-norm."""
        return self._embed(self.clip.image, self.clip.image.batch(require_pixels(pixel_values)))

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed captions ``(B, N)`` as ``(B, E)`` unit-norm."""
        return self._embed(self.clip.text, require_tokens(self.clip.text, input_ids, attention_mask))

    def _embed(self, tokenizer: Tokenizer, inputs: Tensor) -> Tensor:
        if self.config.embeddings == "continuous":
            with full_precision(inputs.device):
                return tokenizer.continuous(inputs)
        return tokenizer.embed(tokenizer.encode(inputs))

    @torch.no_grad()
    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None) -> VqclipOutput:
        """Compare every image with every caption, without gradients; `vqclip.CLIP` is what is trained."""
        images, texts = self.get_image_features(pixel_values), self.get_text_features(input_ids, attention_mask)
        scale, bias = self.clip.temperature()
        with full_precision(images.device):
            logits = scale * images @ texts.T
        logits = logits if bias is None else logits + bias
        return VqclipOutput(logits, logits.T, images, texts)


def require_pixels(pixel_values: Tensor) -> Tensor:
    """Check that images are a tensor, since transformers has the processor for all others; raise ShapeError if not."""
    if not isinstance(pixel_values, Tensor):
        raise ShapeError(
            f"pixel_values: got a {type(pixel_values).__name__}, expected a tensor (B, 3, H, W); VqclipImageProcessor "
            "makes one of PIL images"
        )
    return pixel_values


def require_tokens(tokenizer: TextTokenizer, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return token numbers after a comparison with their mask; raise ShapeError if they do not fit."""
    if not isinstance(input_ids, Tensor):
        raise ShapeError(
            f"input_ids: got a {type(input_ids).__name__}, expected a tensor (B, N); VqclipVocabulary makes one of "
            "captions with return_tensors='pt'"
        )
    tokens = tokenizer.batch(input_ids)
    if attention_mask is not None:
        given, real = attention_mask.to(tokens.device, torch.bool), tokenizer.mask(tokens)
        if given.shape != real.shape or not torch.equal(given, real):
            raise ShapeError(
                f"attention_mask: got a mask of shape {tuple(given.shape)} that differs from the padding of input_ids "
                f"{tuple(real.shape)}; expected that of VqclipVocabulary, or none"
            )
    return tokens
