"""`load_tokenizer`: a whole tokenizer, or only the part that decodes ids.

A language model or a retriever needs only that part of a finished tokenizer. It loads in little more than the time of
``import torch``: neither a tower's library nor an image library is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from vqclip.config import Modality
from vqclip.tokenizer.folder import MODALITIES, TokenizerFolder, find_folder

if TYPE_CHECKING:
    from vqclip.tokenizer import ImageTokenizer, TextTokenizer
    from vqclip.tokenizer.decoder import TokenizerDecoder


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
) -> TokenizerDecoder: ...
def load_tokenizer(
    folder: str | Path, modality: Modality, *, encode: bool = True, revision: str | None = None
) -> TokenizerDecoder:
    """Load a tokenizer for use: on the CPU, in evaluation mode.

    Args:
        folder: folder that `save_pretrained` wrote, or a hub name ``owner/name``.
        modality: ``"image"`` or ``"text"``.
        encode: False for a tokenizer that decodes and embeds ids but cannot encode: its tower is neither built nor
            read, and no tower's library is imported. Every byte of the folder is still compared with its checksum.
        revision: branch, tag or commit of a hub name; None for the newest.

    Raises:
        CheckpointError: for a folder that is missing or damaged, or contains only the other modality.
        ValueError: for another modality.
    """
    if modality not in MODALITIES:
        raise ValueError(f'modality: got {modality!r}, expected "image" or "text"')
    opened = TokenizerFolder.open(find_folder(folder, revision))
    return load_whole(opened, modality) if encode else opened.load_decoder(modality)


def load_whole(opened: TokenizerFolder, modality: Modality) -> ImageTokenizer | TextTokenizer:
    """Load a tokenizer with its tower from an opened folder, in evaluation mode."""
    from vqclip.tokenizer import ImageTokenizerConfig, TextTokenizerConfig
    from vqclip.towers.training import rename_tower_errors

    config: ImageTokenizerConfig | TextTokenizerConfig
    if modality == "image":
        config = opened.tokenizer_config(modality, ImageTokenizerConfig)
    else:
        config = opened.tokenizer_config(modality, TextTokenizerConfig)

    def build() -> ImageTokenizer | TextTokenizer:
        with rename_tower_errors(f"{modality}.tower"):
            built = config.build(opened.section(modality).embed_dim)
        opened.require_counts(built)
        return built

    tokenizer = opened.load(build, f"{modality}.")
    opened.load_pixels(tokenizer)
    return tokenizer
