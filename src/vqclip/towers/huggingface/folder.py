"""Folders of transformers and sentence-transformers, read as data: JSON, tokenizer and safetensors only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vqclip.errors import ConfigError
from vqclip.io.files import PICKLED, read_bounded

__all__ = ["EncoderFolder", "find_folder"]

MAX_JSON_BYTES = 64 << 20
"""Larger JSON files are not read; the largest `tokenizer.json` in use have 35 MB."""
CONFIG_FILE = "config.json"
VOCABULARY_FILE = "tokenizer.json"
_FETCHED = ("*.json", "*.safetensors")
_NOT_FETCHED = ("onnx/*", "openvino/*", "coreml/*", "*/onnx/*", "*/openvino/*")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(name: str, revision: str | None = None) -> Path:
    """Return a local folder, or fetch a model on the hub into the hub's cache: JSON and safetensors only.

    Args:
        name: a folder, or a hub name ``owner/name``; an existing folder has precedence.
        revision: branch, tag or commit on the hub; None for the newest.

    Raises:
        ConfigError: neither exists, the hub cannot be reached, or a revision of a local folder is given.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"tower.revision: got {revision!r} of a local folder; expected null: only the hub has any"
            )
        return path
    if path.exists() or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"tower.name: {name}: no such folder; expected a folder that save_pretrained of transformers wrote, or the "
            "name owner/name of a model on the hub"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(_FETCHED), ignore_patterns=list(_NOT_FETCHED)
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"tower.name: {name}: no such folder, and the hub cannot be reached or has no such model "
            f"({type(error).__name__}: {reason}); expected a local folder, or a name owner/name whose files are in the "
            "hub's cache: load it once on a machine with network access, or copy the folder"
        ) from error


@dataclass(frozen=True)
class EncoderFolder:
    """A folder with a network and its vocabulary or preprocessing."""

    root: Path
    """The folder; that of sentence-transformers has a ``modules.json``."""
    path: Path
    """The part of it that contains the network."""

    @staticmethod
    def open(root: Path) -> EncoderFolder:
        """Find the network in a folder of transformers or sentence-transformers.

        Raises:
            ConfigError: ``config.json`` is missing, or the first module of sentence-transformers is no transformer.
        """
        modules = _read_json(root / "modules.json", optional=True)
        path = root if modules is None else root / _first_module(root, modules)
        if not (path / CONFIG_FILE).is_file():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) if path.is_dir() else "no such folder"
            raise ConfigError(
                f"tower.name: {path}: expected {CONFIG_FILE}, model.safetensors and, for text, {VOCABULARY_FILE}; got: "
                f"{found or 'an empty folder'}"
            )
        return EncoderFolder(root, path)

    def network(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        config = _read_json(self.path / CONFIG_FILE)
        if not isinstance(config, dict):
            raise ConfigError(f"tower.name: {self.path / CONFIG_FILE}: contains no JSON object; the file is damaged")
        return config

    def vocabulary(self) -> bytes:
        """Return the content of ``tokenizer.json``.

        Raises:
            ConfigError: it is missing, which a tokenizer without a fast version has not, or too large.
        """
        for folder in (self.path, self.root):
            if (folder / VOCABULARY_FILE).is_file():
                return _read(folder / VOCABULARY_FILE)
        raise ConfigError(
            f"tower.name: {self.path}: contains no {VOCABULARY_FILE}, the file of a fast tokenizer; if its tokenizer "
            "has a fast version, transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it"
        )

    def max_seq_length(self) -> int | None:
        """Return the length at which sentence-transformers cuts texts; None if the folder does not say."""
        for folder in (self.path, self.root):
            settings = _read_json(folder / "sentence_bert_config.json", optional=True)
            length = settings.get("max_seq_length") if isinstance(settings, dict) else None
            if isinstance(length, int):
                return length
        return None

    def preprocessor(self) -> dict[str, Any] | None:
        """Return the settings of the image processor; None if the folder has none."""
        settings = _read_json(self.path / "preprocessor_config.json", optional=True)
        if settings is None:
            whole = _read_json(self.path / "processor_config.json", optional=True)
            settings = whole.get("image_processor") if isinstance(whole, dict) else None
        return settings if isinstance(settings, dict) else None

    def require_weights(self) -> None:
        """Check that the folder contains safetensors, and no adapters, whose base model would be fetched.

        Raises:
            ConfigError: pickled weights only, adapters, or no weights.
        """
        names = sorted(path.name for path in self.path.iterdir())
        if "adapter_config.json" in names:
            raise ConfigError(
                f"tower.name: {self.path}: contains adapters (adapter_config.json) of another model; expected whole "
                "weights: merge them with peft's merge_and_unload and save_pretrained"
            )
        if any(name in ("model.safetensors", "model.safetensors.index.json") for name in names):
            return
        pickled = [name for name in names if name.lower().endswith(PICKLED)]
        if pickled:
            raise ConfigError(
                f"tower.name: {self.path}: contains no model.safetensors but {', '.join(pickled[:3])}; pickled files "
                "are never opened, for a pickle can run code. If you trust it, load it with transformers elsewhere and "
                "write it with save_pretrained, or set pretrained: false for random weights"
            )
        raise ConfigError(
            f"tower.name: {self.path}: contains no model.safetensors; expected a folder that save_pretrained of "
            "transformers wrote, or pretrained: false for random weights"
        )


def _first_module(root: Path, modules: Any) -> PurePosixPath:
    """Return the path of the transformer in the folder of sentence-transformers."""
    first = modules[0] if isinstance(modules, list) and modules else None
    kind, path = (first.get("type"), first.get("path")) if isinstance(first, dict) else (None, None)
    if not isinstance(kind, str) or not kind.endswith(".Transformer") or not isinstance(path, str):
        raise ConfigError(
            f"tower.name: {root / 'modules.json'}: the first module is {kind!r}; expected a Transformer of "
            "sentence-transformers, from which features of tokens are taken"
        )
    inside = PurePosixPath(path)
    if inside.is_absolute() or ".." in inside.parts:
        raise ConfigError(f"tower.name: {root / 'modules.json'}: path {path!r} leaves the folder; expected one in it")
    return inside


def _read_json(path: Path, optional: bool = False) -> Any:
    if optional and not path.is_file():
        return None
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tower.name: {path}: not JSON: {error}: the file is damaged") from error


def _read(path: Path) -> bytes:
    try:
        content = read_bounded(path, MAX_JSON_BYTES)
    except OSError as error:
        raise ConfigError(f"tower.name: {path}: cannot be read ({error.strerror})") from error
    if len(content) > MAX_JSON_BYTES:
        raise ConfigError(f"tower.name: {path}: more than {MAX_JSON_BYTES} bytes, which are not read")
    return content
