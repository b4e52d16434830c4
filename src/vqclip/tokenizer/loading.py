"""From an opened tokenizer folder to modules: a whole tokenizer, or only the part that decodes ids.

A language model or a retriever needs only that part of a finished tokenizer. It loads in little more than the time of
``import torch``: neither a tower's library nor an image library is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from vqclip.config import Modality
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.files import read_bounded
from vqclip.io.json_files import validate
from vqclip.io.tensors import read_shapes
from vqclip.tokenizer.decoder import TokenizerDecoder
from vqclip.tokenizer.folder import (
    CONFIG_FILE,
    MODALITIES,
    TokenizerFolder,
    find_folder,
)

if TYPE_CHECKING:
    from vqclip.tokenizer import ImageTokenizer, TextTokenizer


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
    """Load a tokenizer for use: on the CPU, in evaluation mode, with weights that require no gradient.

    ``tokenizer.requires_grad_()`` asks for gradients. `vqclip.CLIP.from_pretrained` loads both tokenizers of a folder
    in the same way.

    Args:
        folder: folder of a run, or that `save_pretrained` wrote; a hub name ``owner/name``; or ``"emoji"``, a small
            tokenizer that comes with the package.
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
    if encode:
        return load_whole(opened, modality)
    section = opened.section(modality)
    return opened.load(lambda: section.build(modality), f"{modality}.", ("tower", "reduce", "project_in"))


def load_whole(opened: TokenizerFolder, modality: Modality) -> ImageTokenizer | TextTokenizer:
    """Load a tokenizer with its tower from an opened folder, as `load_tokenizer` does."""
    from vqclip.towers.base import rename_tower_errors

    config = read_tokenizer_config(opened, modality)

    def build() -> ImageTokenizer | TextTokenizer:
        with rename_tower_errors(f"{modality}.tower"):
            built: ImageTokenizer | TextTokenizer = config.build(opened.section(modality).embed_dim)
            return built

    return opened.load(build, f"{modality}.")


def read_tokenizer_config(opened: TokenizerFolder, modality: Modality) -> Any:
    """Return the whole configuration of a tokenizer, with random weights in place of pretrained ones.

    Raises:
        CheckpointError: the folder lacks this tokenizer, or its section does not fit the schema.
    """
    from vqclip.tokenizer.encoder import ImageTokenizerConfig, TextTokenizerConfig

    path, prefix = opened.path / CONFIG_FILE, f"{modality}.tower."
    schema: Any = ImageTokenizerConfig if modality == "image" else TextTokenizerConfig
    own = {"embed_dim", "num_tokens", "fewest_tokens"}
    section = opened.section(modality).model_dump(exclude=own, exclude_unset=True)
    config = validate(path, schema, section, modality).architecture()
    shapes = read_shapes(opened.weights)
    shapes = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    files = {name: read_bounded(opened.path / name, digest.size) for name, digest in opened.config.files.items()}
    try:
        return config.with_tower(config.tower.with_stored(files, shapes))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {modality}.{error}") from error
