"""Load what the page shows: the tokenizers of a folder, an index, and the images that it was built from."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from vqclip.demo.answers import Answers
from vqclip.errors import CheckpointError, ConfigError
from vqclip.search.hits import open_indexed
from vqclip.search.index import CodeIndex
from vqclip.search.scan import CodeSearch
from vqclip.tokenizer.folder import CONFIG_FILE, TokenizerFolder
from vqclip.tokenizer.loading import load_tokenizer
from vqclip.train.loading import load_model

__all__ = ["index_commands", "load_answers"]


def load_answers(
    folder: str, index: Path | None = None, images: str | None = None, device: torch.device | str = "cpu"
) -> Answers:
    """Load a folder, and an index of its codes.

    Args:
        folder: a run, a checkpoint, or a tokenizer folder, also with one modality alone; or a hub name.
        index: folder of the index.
        images: the images that the index was built from; None to show names alone.
        device: device of the tokenizers.

    Raises:
        CheckpointError: a folder is damaged, contains no tokenizer or one without codes, or the index is of another.
        ConfigError: images without an index.
        DataError: the images are not those that the index was built from.
    """
    if images is not None and index is None:
        raise ConfigError("--images: got images without --index; expected the index that was built from them")
    answers = _load_tokenizers(folder, device)
    for tokenizer in (answers.image, answers.text):
        if tokenizer is not None and not tokenizer.codebook_sizes:
            raise CheckpointError(
                f"{folder}: its {tokenizer.modality} tokenizer has no codes (quantizer: identity); expected one "
                "with codebooks"
            )
    if index is not None:
        answers.search = _load_search(folder, answers, index)
        answers.source = None if images is None else open_indexed(answers.search.index, images)
    return answers


def index_commands(folder: str) -> str:
    """Return the commands that make an index of a folder's codes and show it."""
    place = Path(folder)
    tokenizer = shlex.quote(str(place / "tokenizer" if (place / "tokenizer" / CONFIG_FILE).is_file() else folder))
    return (
        f"vqclip search build --tokenizer {tokenizer} --images path/to/images --out images.index\n"
        f"vqclip demo {shlex.quote(folder)} --index images.index --images path/to/images"
    )


def _load_tokenizers(folder: str, device: torch.device | str) -> Answers:
    path = Path(folder).expanduser()
    for place in (path, path / "tokenizer"):
        if (place / CONFIG_FILE).is_file():
            held = TokenizerFolder.open(place).config.modalities
            if held == ["image"]:
                return Answers(load_tokenizer(place, "image").to(device), None, None)
            if held == ["text"]:
                return Answers(None, load_tokenizer(place, "text").to(device), None)
            break
    model = load_model(folder).model.to(device)
    return Answers(model.image, model.text, float(model.logit_scale.detach().exp()))


def _load_search(folder: str, answers: Answers, path: Path) -> CodeSearch:
    index = CodeIndex.load(path)
    tokenizer = answers.image if index.modality == "image" else answers.text
    if tokenizer is None:
        raise CheckpointError(
            f"--index: {path} is of {index.modality} codes; {folder} has no {index.modality} tokenizer"
        )
    try:
        return CodeSearch(index, tokenizer, keep=True)
    except CheckpointError as error:
        raise CheckpointError(f"--index: {path}: {error}, or build another index:\n{index_commands(folder)}") from None
