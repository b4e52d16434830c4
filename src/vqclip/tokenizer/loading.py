"""`load_tokenizer`: a whole tokenizer, or the half of it that reads codes.

That half is all that a language model or a retriever needs of a finished tokenizer. It is loaded in little more than
the time of ``import torch``: no tower, and nothing that a tower or a picture would need, is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from pydantic import model_validator

from vqclip.config.bounds import EmbedDim, NumTokens, fewest_within_tokens
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import validate
from vqclip.tokenizer.pretrained import CONFIG_FILE, load_weights, read_config, require_header, resolve
from vqclip.tokenizer.reader import ENCODING_KEYS, ENCODING_PARTS, CodeReader, ReadingConfig

if TYPE_CHECKING:
    from vqclip.tokenizer import ImageTokenizer, TextTokenizer

Modality = Literal["image", "text"]
_PARTS = ("image", "text", "temperature")


class StoredReader(ReadingConfig):
    """A tokenizer's section without what says how ids are made."""

    embed_dim: EmbedDim
    """E, width of the joint embedding."""
    num_tokens: NumTokens
    """N."""
    fewest_tokens: NumTokens
    """How few of them a batch may come with."""

    _fewest_within_tokens = model_validator(mode="after")(fewest_within_tokens)

    def build(self, modality: Modality) -> CodeReader:
        """Make the reader with random weights."""
        return CodeReader(modality, self, self.num_tokens, self.fewest_tokens, self.embed_dim)


@overload
def load_tokenizer(
    folder: str | Path, modality: Literal["image"], *, encode: Literal[True] = True, revision: str | None = None
) -> ImageTokenizer: ...
@overload
def load_tokenizer(
    folder: str | Path, modality: Literal["text"], *, encode: Literal[True] = True, revision: str | None = None
) -> TextTokenizer: ...
@overload
def load_tokenizer(
    folder: str | Path, modality: Modality, *, encode: Literal[False], revision: str | None = None
) -> CodeReader: ...
def load_tokenizer(
    folder: str | Path, modality: Modality, *, encode: bool = True, revision: str | None = None
) -> ImageTokenizer | TextTokenizer | CodeReader:
    """Load a tokenizer for use: on the CPU, in evaluation mode.

    Args:
        folder: what `save_pretrained` wrote, or a hub name ``owner/name``.
        modality: ``"image"`` or ``"text"``.
        encode: False for a tokenizer that decodes and embeds ids but makes none: its tower is neither built nor read,
            and no tower's library is imported. Every byte of the folder is compared with its hash all the same.
        revision: branch, tag or commit of a hub name; None for the newest.

    Raises:
        CheckpointError: for a folder that is missing, damaged, or holds the other modality alone.
        ValueError: for another modality.
    """
    if modality not in ("image", "text"):
        raise ValueError(f'modality: got {modality!r}, expected "image" or "text"')
    path = resolve(folder, revision)
    return _load_whole(path, modality) if encode else _load_reader(path, modality)


def _load_whole(path: Path, modality: Modality) -> ImageTokenizer | TextTokenizer:
    from vqclip.tokenizer.folder import build_filled, read_folder

    config = read_folder(path)
    stored = config.image if modality == "image" else config.text
    if stored is None:
        raise CheckpointError(f"{path}: holds {config.held()} tokenizer, not {modality!r}")
    build: Callable[[], ImageTokenizer | TextTokenizer] = stored.build_stored
    return build_filled(path, build, prefix=f"{modality}.")


@torch.inference_mode(False)  # so that what is loaded in inference mode can be used outside of it
def _load_reader(path: Path, modality: Modality) -> CodeReader:
    stored = _read_section(path, modality)
    try:
        reader = stored.build(modality)
    except ConfigError as error:
        raise CheckpointError(f"{path / CONFIG_FILE}: {modality}: {error}") from error
    load_weights(path, reader, f"{modality}.", adopt_dtype=True, without=ENCODING_PARTS)
    return reader.eval()


def _read_section(path: Path, modality: Modality) -> StoredReader:
    """One tokenizer's section of ``config.json``, strictly but for the keys that only encoding needs.

    The weights' header is compared with it.
    """
    config = read_config(path)
    where = path / CONFIG_FILE
    if surplus := sorted(set(config) - set(_PARTS)):
        raise CheckpointError(f"{where}: {surplus[0]}: unknown key; expected some of {', '.join(_PARTS)}")
    section: Any = config.get(modality)
    if section is None:
        held = ", ".join(name for name in ("image", "text") if config.get(name) is not None) or "no"
        raise CheckpointError(f"{path}: holds {held} tokenizer, not {modality!r}")
    if not isinstance(section, dict):
        raise CheckpointError(f"{where}: {modality}: got {section!r}, expected a section")
    if "num_tokens" not in section:
        raise CheckpointError(
            f"{where}: does not say how many tokens there are, as folders of format 2 do not; expected one of format "
            "3: load both tokenizers with vqclip.model.CLIP.from_pretrained(folder) and save_pretrained them to a new "
            "folder, or give the finished run's command again"
        )
    reading = {key: value for key, value in section.items() if key not in ENCODING_KEYS}
    stored = validate(where, StoredReader, reading, section=modality)
    shapes = stored.shapes(f"{modality}.", stored.num_tokens, stored.embed_dim)
    require_header(path, [name for name in _PARTS if config.get(name) is not None], shapes)
    return stored
