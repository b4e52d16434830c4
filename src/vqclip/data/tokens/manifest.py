"""``manifest.json`` of a folder of token shards: what made them, how many samples there are, and the hash of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from vqclip.config import Config
from vqclip.data.tokens.layout import IdLayout
from vqclip.errors import CheckpointError, DataError
from vqclip.io.json_files import add_checksum, read_versioned, validation_problems
from vqclip.nn.precision import Precision

__all__ = [
    "BAD_FILE",
    "MANIFEST_FILE",
    "RECORDS",
    "SETTINGS_FILE",
    "SUFFIXES",
    "Manifest",
    "Settings",
    "ShardInfo",
    "SourceShard",
    "TokenizerInfo",
    "json_file_bytes",
    "read_json_file",
    "read_manifest",
]

MANIFEST_FILE = "manifest.json"
SETTINGS_FILE = "settings.json"
BAD_FILE = "bad_samples.jsonl"
RECORDS = "records"
"""Folder with a file for every finished shard."""
SUFFIXES = {"wds": ".tar", "parquet": ".parquet"}
"""Format → how the names of its shards end."""
_VERSIONS = {"format": "vqclip tokens", "format_version": 2}
"""1 did not have the fingerprints of the tokenizers."""
_SHARD_NAME = r"^[0-9]{5,9}\.(tar|parquet)$"

_Count = Annotated[int, Field(ge=0, le=2**40)]  # so that no manifest that is read adds up to 2**63
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TokenizerInfo(Config):
    """Which tokenizer made the ids."""

    image: _Hash | None
    """`vqclip.tokenizer.fingerprint` of the image tokenizer, also in indexes and ONNX folders; None: no image ids."""
    text: _Hash | None
    """The same of the text tokenizer."""
    weights: _Hash
    """SHA-256 of the folder's `model.safetensors`."""
    config: _Hash
    """SHA-256 of its `config.json`."""
    id_layout: int
    """Version of the meaning of ids."""


class SourceShard(Config):
    """A shard that was tokenized."""

    name: str
    """File name."""
    size: _Count
    """Bytes."""
    samples: _Count
    """Samples in it, unusable ones included."""
    sha256: str
    """Hash of all of it."""


class Settings(Config):
    """All that the bytes of token shards follow from."""

    storage: Literal["wds", "parquet"]
    """Format of the token shards."""
    tokenizer: TokenizerInfo
    """Which tokenizer."""
    image: IdLayout | None
    """The ids of images; None where they were not tokenized."""
    text: IdLayout | None
    """The ids of texts; None where they were not tokenized."""
    batch_size: int = Field(ge=1)
    """Samples at once: the shape of a batch may change the last bits of what the quantizer rounds."""
    precision: Precision | Literal["exact"]
    """Floating-point type that the tokenizer computed in; ``exact`` in shards of a former version."""
    device: str
    """Kind of device that it computed on."""
    threads: int = Field(ge=1)
    """Threads of a process on the CPU, which change the order of sums."""
    max_pixels: int = Field(ge=1)
    """Larger images are bad samples."""
    made_with: dict[str, str]
    """Versions of what decodes and computes."""
    data: dict[str, Any]
    """What was tokenized: the source's fingerprint."""
    shards: tuple[SourceShard, ...]
    """The shards of it, in order; each became one token shard."""


class ShardInfo(Config):
    """A finished token shard."""

    name: str = Field(pattern=_SHARD_NAME)
    """File name: a number and the format's ending, so that it leads nowhere else."""
    size: _Count
    """Bytes."""
    sha256: str
    """Hash of all of it."""
    samples: _Count
    """Samples in it."""
    bad: dict[str, _Count]
    """Kind of what was wrong → samples that were left out."""


class Manifest(Config):
    """A whole folder of token shards."""

    settings: Settings
    """What they follow from."""
    samples: _Count
    """Samples in all shards."""
    bad: dict[str, _Count]
    """Kind of what was wrong → samples that were left out; `bad_samples.jsonl` names them."""
    shards: tuple[ShardInfo, ...]
    """The shards, in order."""

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        suffix = SUFFIXES[self.settings.storage]
        for shard in self.shards:
            if not shard.name.endswith(suffix):
                raise ValueError(f"shards: got the name {shard.name}, expected one that ends in {suffix}")
        total = sum(shard.samples for shard in self.shards)
        if self.samples != total:
            raise ValueError(f"samples: got {self.samples}, expected {total}, the sum over its shards")
        return self


def json_file_bytes(facts: Config, **more: Any) -> bytes:
    """A JSON file that holds its own hash."""
    return add_checksum({**_VERSIONS, **facts.model_dump(mode="json"), **more})


def read_json_file(path: Path) -> dict[str, Any]:
    """What `json_file_bytes` was given.

    Raises:
        DataError: the file is damaged, not ours, or of another version.
        OSError: it cannot be read.
    """
    try:
        return read_versioned(path, _VERSIONS, "tokenize anew, or use the vqclip that wrote it")
    except CheckpointError as error:
        raise DataError(str(error)) from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder.

    Raises:
        DataError: there is none, or it is damaged or of another version; says what to do.
    """
    path = folder / MANIFEST_FILE
    try:
        return Manifest.model_validate_json(json.dumps(read_json_file(path)))
    except OSError as error:
        if (folder / SETTINGS_FILE).exists():
            done = len([*(folder / RECORDS).glob("*.json")])
            raise DataError(
                f"{folder}: is not finished ({done} shards are); run the same `vqclip tokenize` command again"
            ) from None
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); expected a folder that `vqclip tokenize` wrote"
        ) from None
    except ValidationError as error:
        raise DataError(f"{path}: " + "; ".join(validation_problems(error))) from None
