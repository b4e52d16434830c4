"""Write tokenizer folders, and push them to the hub with a card, the page that the hub shows (Markdown).

`vqclip.tokenizer.folder` reads them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vqclip.errors import CheckpointError, ConfigError, NonFiniteError, printable
from vqclip.io.atomic import FileDigest, digest_file, replace_folder, restore_folder, write_text
from vqclip.io.files import HUB_NAME, expand_home
from vqclip.io.json_files import add_checksum, read_json
from vqclip.io.tensors import first_names, nonfinite_names, save_tensors
from vqclip.pixels.decoder import PIXELS_FILE
from vqclip.tokenizer.folder import (
    CARD_FILE,
    CONFIG_FILE,
    EXTRA_FILES,
    FILES,
    MODALITIES,
    MODEL_TYPES,
    PIXELS_PREFIX,
    PROCESSOR_FILE,
    VERSIONS,
    WEIGHTS_FILE,
    TokenizerFolder,
)

PROCESSOR_CLASS = "VqclipImageProcessor"
"""Class of `vqclip.integrations.transformers` that reads the images of a folder."""
FRONT = """---
library_name: vqclip
tags: [clip, image-tokenizer, text-tokenizer, vector-quantization]
# license: add the license of the weights here, such as apache-2.0
---
"""

USE = """
```python
import vqclip

tokenizer = vqclip.load_tokenizer(folder, modality="image")  # this folder, or its name on the hub
ids = tokenizer.encode(images)  # (B, N, C) int64; for modality="text" a list of captions
embedding = tokenizer.embed(ids)  # (B, E) unit-norm, in the joint space of images and texts
```

`tokenizer.decode(ids)` returns the vectors `(B, N, D)` for a downstream model. With a pixel decoder in the folder
(`pixels.safetensors`), `tokenizer.to_pil(tokenizer.decode_pixels(ids))` returns images.
`load_tokenizer(folder, modality="image", encode=False)` decodes and embeds stored ids without the tower and its
library. In transformers: `VqclipImageTokenizer`, `VqclipTextTokenizer` and `VqclipModel` of
`vqclip.integrations.transformers`; in mteb: `vqclip.integrations.mteb.load(folder)`.
"""

NO_FIGURES = "No figures were given: the card of a run's own folder has those of its evaluation."


def save_folder(
    folder: str | Path, config: dict[str, Any], state: dict[str, Tensor], files: Mapping[str, bytes]
) -> None:
    """Write a tokenizer folder with a card, atomically. An existing tokenizer is replaced, together with its card.

    Raises:
        ConfigError: something would be lost: a tokenizer of another modality, another model, or other files.
        CheckpointError: the existing configuration is damaged.
    """
    target = expand_home(folder).resolve()  # renaming a link would leave what it points to

    def fill(folder: Path) -> None:
        write_weights(folder, state)
        write_config(folder, config, files)
        if "image" in config:
            (folder / PROCESSOR_FILE).write_text(json.dumps({"image_processor_type": PROCESSOR_CLASS}))
        if not (folder / CARD_FILE).exists():  # a user's own, beside which no tokenizer was yet
            what = " and ".join(f"{name}s" for name in MODALITIES if name in config)
            text = card(printable(target.name, one_line=True), f"A tokenizer of {what}, made with vqclip.")
            (folder / CARD_FILE).write_text(text, encoding="utf-8")

    restore_folder(target)
    if target.exists() and not (target / CONFIG_FILE).exists():  # the configuration is written last
        fill(target)
        return
    if target.exists():
        _require_nothing_lost(target, config)
    replace_folder(target, fill)


def _require_nothing_lost(folder: Path, config: dict[str, Any]) -> None:
    """Check that ``folder`` contains only a tokenizer that ``config`` may replace; raise ConfigError otherwise."""
    stored, _ = read_json(folder / CONFIG_FILE)
    if stored.get("format") != VERSIONS["format"]:
        raise ConfigError(f"{folder}: contains another model's {CONFIG_FILE}, which would be lost; name another folder")
    if others := [name for name in MODALITIES if stored.get(name) is not None and name not in config]:
        raise ConfigError(
            f"{folder}: contains a tokenizer of modality {others[0]!r}, which would be lost; name another folder, or "
            "save both into one with vqclip.model.CLIP.save_pretrained"
        )
    if stored.get("pixels") is not None and "pixels" not in config:
        raise ConfigError(f"{folder}: contains a pixel decoder, which would be lost; name another folder")
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in FILES):
        raise ConfigError(
            f"{folder}: contains {', '.join(foreign[:5])} beside a tokenizer, which would be lost; name another folder"
        )
    if Path.cwd().is_relative_to(folder):
        raise ConfigError(f"{folder}: is the working folder, which cannot be replaced; name another folder")


def write_weights(folder: Path, state: dict[str, Tensor]) -> FileDigest:
    """Write ``state`` to ``folder``, which is made if missing, and return the digest of the file; not atomic.

    Tensors of a pixel decoder are written to a file of their own.

    Raises:
        NonFiniteError: a tensor contains NaN or infinity, and nothing is written.
    """
    if bad := nonfinite_names(state):
        raise NonFiniteError(f"{folder}: not written, as these tensors contain NaN or infinity: {first_names(bad)}")
    files: dict[str, dict[str, Tensor]] = {WEIGHTS_FILE: {}}
    seen: set[int] = set()
    for name, tensor in state.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        file = PIXELS_FILE if name.startswith(PIXELS_PREFIX) else WEIGHTS_FILE
        files.setdefault(file, {})[name] = plain.clone() if memory in seen else plain  # tied ones are stored twice
        seen.add(memory)
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        save_tensors(tensors, folder / file)
    return digest_file(folder / WEIGHTS_FILE)


def write_config(folder: Path, config: dict[str, Any], files: Mapping[str, bytes]) -> None:
    """Write ``files``, and ``config`` (JSON-able) with their digests and those of the weights; not atomic.

    The weights are in ``folder`` already.
    """
    weights = digest_file(folder / WEIGHTS_FILE).model_dump()
    if "pixels" in config:
        digest = digest_file(folder / PIXELS_FILE)
        config = config | {"pixels": config["pixels"] | {"weights": digest.model_dump()}}
    for name, content in files.items():
        assert name in EXTRA_FILES, name
        (folder / name).write_bytes(content)
    digests = {name: digest_file(folder / name).model_dump() for name in files}
    extra: dict[str, Any] = {"files": digests} if digests else {}
    if modalities := tuple(name for name in MODALITIES if name in config):
        extra["model_type"] = MODEL_TYPES[modalities]
    (folder / CONFIG_FILE).write_bytes(add_checksum({**VERSIONS, "weights": weights, **extra, **config}))


def push_folder(
    folder: str | Path, name: str, *, private: bool | None = None, revision: str | None = None, message: str = ""
) -> str:
    """Push a tokenizer folder to the hub: configuration, weights and card, and no other file.

    Every byte is compared with its checksum first. huggingface_hub finds the credentials (``hf auth login``, or
    ``HF_TOKEN``).

    Args:
        folder: folder that `save_pretrained` or a run wrote.
        name: ``owner/name``; made if it is missing.
        private: whether a new model is visible to its owner only; None: the hub's default.
        revision: branch to write to, made if it is missing; None for the main one.
        message: of the commit.

    Returns:
        The commit's address.

    Raises:
        CheckpointError: for a folder that is missing or damaged, an invalid name, or a hub that cannot be reached or
            refuses.
    """
    if not HUB_NAME.fullmatch(name):
        raise CheckpointError(f"hub: got the name {name!r}, expected owner/name")
    folder = expand_home(folder)
    for path in (folder / file for file in FILES):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"{path}: is a link or not a regular file, expected a file; cp -rL copies them")
    TokenizerFolder.open(folder)
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=list(FILES),
            revision=revision,
            commit_message=message or "Tokenizer, written by vqclip",
        )
    except Exception as error:  # huggingface_hub's own errors, and those of its HTTP library
        raise CheckpointError(
            f"{name}: could not be sent to the hub: {type(error).__name__}: {error}; `hf auth login` shows your "
            "account, and HF_HUB_OFFLINE must not be set"
        ) from error
    return str(commit.commit_url)


def save_and_push(
    save: Callable[[Path], object],
    name: str,
    text: str | None = None,
    *,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Push what ``save`` writes into a temporary folder, with the card ``text`` or a plain one; see `push_folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(folder)
        title, what = name.rpartition("/")[2], "A tokenizer of images, texts or both, made with vqclip."
        write_text(folder / CARD_FILE, card(title, what) if text is None else text)
        return push_folder(folder, name, private=private, revision=revision)


def card(title: str, what: str, more: str = NO_FIGURES) -> str:
    """Return a card: a title, a description in a sentence or two, and ``more``: figures, data, training."""
    return f"{FRONT}# {title}\n\n{what}\n{USE}\n{more.rstrip()}\n"
