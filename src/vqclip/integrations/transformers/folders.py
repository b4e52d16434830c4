"""Configurations and models of tokenizer folders in transformers: what all of them have in common."""

from __future__ import annotations

import os
import reprlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from vqclip import dist
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import read_json
from vqclip.tokenizer.folder import CONFIG_FILE, VERSIONS, find_folder

FolderModelT = TypeVar("FolderModelT", bound="FolderModel")

_NOT_KEPT = (*VERSIONS, "weights", "files", "pixels", "frozen", "adapters", "sha256")
"""Keys of ``config.json`` that describe the files of a folder, not the model."""
_WITHOUT_EFFECT = (
    *("_commit_hash", "_from_auto", "_from_pipeline", "adapter_kwargs", "device_map", "dtype", "low_cpu_mem_usage"),
    *("max_shard_size", "proxies", "torch_dtype", "trust_remote_code", "use_fast"),
)
"""Options of transformers that change nothing here, or only models, which name them: no code is fetched, for one."""
_USUAL = {"safe_serialization": True, "use_safetensors": True}
"""Options of which only this value is possible."""


class _FolderConfig(PretrainedConfig):
    """Common part. Version 5 of transformers calls the ``__init__`` of a class itself, never an inherited one."""

    sections: ClassVar[tuple[str, ...]] = ()

    def _read(self, sections: dict[str, Any], others: dict[str, Any]) -> None:
        for name in (*_NOT_KEPT, "image", "text", "temperature"):
            others.pop(name, None)
        PretrainedConfig.__init__(self, **others)
        for name, value in sections.items():
            setattr(self, name, value)


class VqclipImageTokenizerConfig(_FolderConfig):
    """Configuration of a `VqclipImageTokenizer`.

    Attributes:
        image: the section of the same name in a tokenizer folder's ``config.json``.
    """

    model_type = "vqclip_image_tokenizer"
    sections = ("image",)

    def __init__(self, image: dict[str, Any] | None = None, **others: Any):
        self._read({"image": image}, others)


class VqclipTextTokenizerConfig(_FolderConfig):
    """Configuration of a `VqclipTextTokenizer`.

    Attributes:
        text: the section of the same name in a tokenizer folder's ``config.json``.
    """

    model_type = "vqclip_text_tokenizer"
    sections = ("text",)

    def __init__(self, text: dict[str, Any] | None = None, **others: Any):
        self._read({"text": text}, others)


class VqclipConfig(_FolderConfig):
    """Configuration of a `VqclipModel`.

    Attributes:
        image, text, temperature: the sections of the same names in a tokenizer folder's ``config.json``.
        embeddings: ``codes_only``: images and texts are embedded from their ids alone; ``continuous``: with the
            quantizers bypassed. Not part of a folder.
    """

    model_type = "vqclip"
    sections = ("image", "text", "temperature")

    def __init__(
        self,
        image: dict[str, Any] | None = None,
        text: dict[str, Any] | None = None,
        temperature: dict[str, Any] | None = None,
        embeddings: str = "codes_only",
        **others: Any,
    ):
        self._read({"image": image, "text": text, "temperature": temperature, "embeddings": embeddings}, others)


class FolderModel(PreTrainedModel):
    """A model of transformers around a module that is stored in a tokenizer folder.

    Weights keep the type in which they were stored, or get float32 or float64: `TokenizerDecoder` refuses others.
    """

    base_model_prefix = ""

    @classmethod
    @abstractmethod
    def _load(cls, folder: Path) -> nn.Module:
        """Load the module from a folder."""

    @property
    @abstractmethod
    def _stored(self) -> Any:
        """The module that is stored in a folder."""

    def _init_weights(self, module: nn.Module) -> None:
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
        stored = cls._load(folder)
        config_class: Any = cls.config_class
        found = config_class(**read_json(folder / CONFIG_FILE)[0])
        if config is not None:
            _require_equal_sections(config, found, folder)
            found = config
        if "embeddings" in options and hasattr(found, "embeddings"):
            found.embeddings = options.pop("embeddings")
        require_no_options(f"{cls.__name__}.from_pretrained", options)
        found.name_or_path = str(pretrained_model_name_or_path)
        found.architectures = [cls.__name__]
        model: Any = cls(found, stored)
        wanted = _parse_dtype(dtype if dtype is not None else torch_dtype)
        if wanted is not None:
            model.to(wanted)
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
            self._stored.save_pretrained(save_directory)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        card: str | None = None,
        *,
        private: bool | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> str:
        """Save this model and push it to the hub with a card; see `Tokenizer.push_to_hub`.

        Args:
            repo_id: ``owner/name``; made if it is missing.
            card: Markdown; None for a card without figures.
            private: whether a new model is visible to its owner only; None: the hub's default.
            revision: branch to write to, made if it is missing.
            options: other options of transformers, which are refused.

        Returns:
            The commit's address.
        """
        require_no_options(f"{type(self).__name__}.push_to_hub", options)
        address: str = self._stored.push_to_hub(repo_id, card, private=private, revision=revision)
        return address


def local_folder(name: str | os.PathLike[str], revision: str | None) -> Path:
    """Return a local folder or fetch one; transformers gives local folders the revision "main"."""
    path = os.fspath(name)
    return find_folder(path, None if revision is not None and str(revision) == "main" else revision)


def require_no_options(function: str, options: Mapping[str, Any]) -> None:
    """Refuse options that would change something in transformers and are not supported; raise ConfigError."""
    strange = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and name not in _WITHOUT_EFFECT and value != _USUAL.get(name)
    }
    if strange:
        shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in strange.items())  # images are long
        raise ConfigError(
            f"{function}: got {shown}; expected none of these. Set HF_TOKEN, HF_HOME or HF_HUB_OFFLINE in the "
            "environment for access to the hub"
        )


def _require_equal_sections(config: PretrainedConfig, found: Any, folder: Path) -> None:
    if not isinstance(config, type(found)):
        raise ConfigError(f"config: got a {type(config).__name__}, expected a {type(found).__name__}")
    for name in found.sections:
        if getattr(config, name) != getattr(found, name):
            raise CheckpointError(f"config: its section {name} differs from that in {folder / CONFIG_FILE}")


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype: got {dtype!r}, expected a torch.dtype such as torch.float32, or auto")
    return found
