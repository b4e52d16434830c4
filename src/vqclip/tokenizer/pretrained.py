"""The tokenizer folder: ``config.json`` and ``model.safetensors``, read strictly and without pickle.

One folder holds an image tokenizer, a text tokenizer, or both with their temperature. Weights of a part are stored
under its name (``image.``, ``text.``), so that one modality is read without the other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vqclip.errors import CheckpointError, ConfigError, NonFiniteError
from vqclip.io.atomic import replace_folder, restore_folder
from vqclip.io.digest import FileDigest, digest_file, verify_file
from vqclip.io.json_files import add_checksum, read_json, verify_checksum
from vqclip.io.tensors import (
    first_names,
    nonfinite_names,
    open_tensors,
    read_shapes,
    save_tensors,
    shape_differences,
    tensor_differences,
)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
"""All that is ever fetched from the hub or sent to it."""
FORMAT_VERSION = 3
"""2 did not say how many tokens there are; see `vqclip.tokenizer.loading`."""
_READABLE = (2, FORMAT_VERSION)
ID_LAYOUT_VERSION = 1
"""Meaning of ids ``(B, N, C)``; raised when an id of an old folder would no longer mean the same code."""
_HEADER = ("format", "format_version", "id_layout", "weights")
_MODALITIES = ("image", "text")
_TEMPERATURE = ("logit_scale", "logit_bias")
_COUNTS = ("num_tokens", "fewest_tokens")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill", ".npy", ".npz")


def home_expanded(folder: str | Path) -> Path:
    """A path with ``~`` and ``~user`` spelt out; as it is where there is no such user."""
    return Path(os.path.expanduser(folder))


def save_folder(folder: str | Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    """`write_folder` in one stroke: a tokenizer that lies there is replaced, with its card, or stays as it was.

    Raises:
        ConfigError: what lies there would be lost: a tokenizer of another modality, another model, or other files.
        CheckpointError: the configuration that lies there is damaged.
    """
    target = home_expanded(folder).resolve()  # renaming a link would leave what it points to
    restore_folder(target)
    if not target.exists():
        replace_folder(target, lambda aside: write_folder(aside, config, state))
    elif not (target / CONFIG_FILE).exists():  # no tokenizer before the configuration is there, which comes last
        write_folder(target, config, state)
    else:
        _require_nothing_lost(target, config)
        replace_folder(target, lambda aside: write_folder(aside, config, state))


def _require_nothing_lost(folder: Path, config: dict[str, Any]) -> None:
    """Raises ConfigError unless ``folder`` holds a tokenizer that ``config`` is to stand in place of, and no more."""
    stored, _ = read_json(folder / CONFIG_FILE)
    if stored.get("format") != "vqclip":
        raise ConfigError(f"{folder}: holds another model's {CONFIG_FILE}, which would be lost; name another folder")
    if others := [name for name in _MODALITIES if stored.get(name) is not None and name not in config]:
        raise ConfigError(
            f"{folder}: holds a tokenizer of modality {others[0]!r}, which would be lost; name another folder, or "
            "save both into one with vqclip.model.CLIP.save_pretrained"
        )
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in FILES):
        raise ConfigError(
            f"{folder}: holds {', '.join(foreign[:5])} beside a tokenizer, which would be lost; name another folder"
        )
    if Path.cwd().is_relative_to(folder):
        raise ConfigError(f"{folder}: is the working folder, which cannot be replaced; name another folder")


def write_folder(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Write ``config`` (JSON-able) and ``state`` to ``folder``, made if missing; `save_folder` loses nothing there.

    Raises:
        NonFiniteError: a tensor contains NaN or infinity, and nothing is written.
    """
    if bad := nonfinite_names(state):
        raise NonFiniteError(f"{folder}: not written, as these tensors contain NaN or infinity: {first_names(bad)}")
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(_as_stored(state), folder / WEIGHTS_FILE)
    seal_folder(folder, config)


def _as_stored(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The file is read on any machine: tensors on the CPU, contiguous, tied ones apart."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return stored


def seal_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.json`` for the weights that lie in ``folder``: it holds their hash, and its own."""
    header = {"format": "vqclip", "format_version": FORMAT_VERSION, "id_layout": ID_LAYOUT_VERSION}
    weights = {"weights": digest_file(folder / WEIGHTS_FILE).model_dump()}
    (folder / CONFIG_FILE).write_bytes(add_checksum(header | weights | config))


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``, check whose it is, and compare every byte of it and of the weights with their hashes.

    Returns:
        What it holds besides format, versions and hashes.

    Raises:
        CheckpointError: when the folder or a file is missing, not ours, damaged, or of another version.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        if (folder / "tokenizer" / CONFIG_FILE).is_file():
            found = f"a run's folder; name its tokenizer: {folder / 'tokenizer'}"
        raise CheckpointError(
            f"{folder}: expected a tokenizer folder with {CONFIG_FILE} and {WEIGHTS_FILE}, got: {found}"
            + _pickles(folder)
        )
    try:
        config, data = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if config.get("format") != "vqclip":
        raise CheckpointError(
            f'{path}: expected "format": "vqclip"; this is some other model\'s folder' + _pickles(folder)
        )
    if config.get("format_version") == 1:
        raise CheckpointError(
            f"{path}: format_version is 1, which had no hashes; this vqclip reads {FORMAT_VERSION}. Run the training "
            "command of the finished run once more: it exports the folder anew"
        )
    for key, known in (("format_version", _READABLE), ("id_layout", (ID_LAYOUT_VERSION,))):
        if config.get(key) not in known:
            reads = " and ".join(map(str, known))
            raise CheckpointError(
                f"{path}: {key} is {config.get(key)!r}, this vqclip reads {reads}; install a newer one"
            )
    config = verify_checksum(path, config, data)
    if config["format_version"] == FORMAT_VERSION:
        _require_counts(path, config)
    try:
        weights = FileDigest(**config["weights"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not say what {WEIGHTS_FILE} should be") from error
    if not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: no such file" + (_pickles(folder) or "; pickled weights are never fetched")
        )
    verify_file(folder / WEIGHTS_FILE, weights, CONFIG_FILE)
    return {key: value for key, value in config.items() if key not in _HEADER}


def _require_counts(path: Path, config: dict[str, Any]) -> None:
    for name in _MODALITIES:
        section = config.get(name)
        for key in _COUNTS:
            if isinstance(section, dict) and section.get(key) is None:
                raise CheckpointError(
                    f"{path}: {name}.{key}: got none, expected a number, which folders of format 2 alone may lack; "
                    "write the folder anew with save_pretrained"
                )


def _pickles(folder: Path) -> str:
    """What to say of files that could hold a pickle, if there are any."""
    if not folder.is_dir():
        return ""
    found = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLED)
    return f"; pickled files are never opened, for a pickle can run code: {', '.join(found[:8])}" if found else ""


def require_header(folder: Path, parts: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what the weights' header says with the configuration, before memory is taken for what that asks for.

    Args:
        folder: the tokenizer folder.
        parts: those of ``config.json`` that are there; every tensor must be of one, also of one that is not loaded.
        shapes: of some tensors, by their names in the folder.

    Raises:
        CheckpointError: for a missing or damaged file, a tensor of no part, and a missing or wrongly shaped one.
    """
    path = folder / WEIGHTS_FILE
    modalities = tuple(f"{name}." for name in _MODALITIES if name in parts)
    others = _TEMPERATURE if "temperature" in parts else ()
    with open_tensors(path) as file:
        names = list(file.keys())
        got = read_shapes(file, shapes)
    problems = [f"unexpected {name}" for name in names if not name.startswith(modalities) and name not in others]
    _require_none(path, problems + shape_differences(shapes, got))


def _require_none(path: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{path} does not fit its {CONFIG_FILE}: " + "; ".join(problems[:10]))


def load_weights(
    folder: Path, module: nn.Module, prefix: str = "", *, adopt_dtype: bool = False, without: tuple[str, ...] = ()
) -> None:
    """Load the tensors under ``prefix`` into ``module``, bit for bit: every one, and no other.

    Of the rest of the folder `require_header` knows.

    Args:
        folder: the tokenizer folder.
        module: what is filled.
        prefix: how the names of its tensors begin in the folder.
        adopt_dtype: first bring the module to the floating-point type that it was saved in.
        without: parts under ``prefix`` that ``module`` does not have, such as ``tower``; they are not read.

    Raises:
        CheckpointError: for a missing or damaged file, for missing, unexpected or wrongly shaped or typed tensors, and
            for NaN or infinity in them.
    """
    path = folder / WEIGHTS_FILE
    left_out = tuple(f"{prefix}{part}." for part in without)
    expected = {f"{prefix}{name}": tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    with open_tensors(path) as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a mapping)
        names = [name for name in names if not name.startswith(left_out)]
        _require_none(path, shape_differences(expected, read_shapes(file, names)))  # before memory is taken for them
        state = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    if bad := nonfinite_names(state):
        raise CheckpointError(
            f"{path}: these tensors contain NaN or infinity: {first_names(bad)}; use an older checkpoint"
        )
    if adopt_dtype:
        dtypes = [state[name].dtype for name, _ in module.named_parameters() if name in state]
        floats = [dtype for dtype in dtypes if dtype.is_floating_point]
        if floats:  # the commonest: codebooks stay in float32 when all else is rounded
            module.to(Counter(floats).most_common(1)[0][0])
    _require_none(path, tensor_differences(module.state_dict(), state, prefix))
    module.load_state_dict(state, strict=True)


def resolve(folder: str | Path, revision: str | None = None) -> Path:
    """A local folder, or a hub name (``owner/name``) brought to the hub's cache; only JSON, safetensors and card.

    Args:
        folder: what to find; a folder here goes before a model on the hub.
        revision: branch, tag or commit on the hub; None for the newest.

    Raises:
        CheckpointError: a name that is neither, a hub that cannot be reached, or a revision of a folder here.
    """
    path = home_expanded(folder)
    if path.exists() or str(folder).count("/") != 1 or str(folder).startswith((".", "/", "~")):
        if revision is not None:
            raise CheckpointError(
                f"{folder}: got revision {revision!r} of a local folder, expected none: only models on the hub have "
                "revisions, and their names are owner/name"
            )
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(folder), revision=revision, allow_patterns=list(FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        at = "" if revision is None else f" (revision {revision!r})"
        raise CheckpointError(
            f"{folder}{at}: neither a folder here nor a model on the hub that can be reached or is in its cache: "
            f"{error}; expected a folder that save_pretrained wrote, or owner/name of one that push_to_hub sent. "
            "Without a network, load it once where there is one, or copy the folder"
        ) from error
