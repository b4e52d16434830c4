"""Configurations: the sections of a tokenizer folder's ``config.json``, as transformers reads them."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from vqclip.tokenizer.folder import VERSIONS

_NOT_KEPT = (*VERSIONS, "weights", "files", "pixels", "frozen", "adapters", "sha256")
"""Keys of ``config.json`` that describe the files of a folder, not the model."""


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
