"""Make token shards: the part of the work that every process of a job does, on any engine."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from vqclip.data.in_order import require_few_bad
from vqclip.data.tokens import IdLayout
from vqclip.data.tokens.manifest import Settings, ShardInfo, SourceShard, TokenizerInfo
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import problem_message, read_json
from vqclip.tokenize_dataset.batches import DecodedBatch, ShardBatches, ShardSamples
from vqclip.tokenize_dataset.encode import EncodedShard, Encoders
from vqclip.tokenize_dataset.folder import TokenFolder
from vqclip.tokenize_dataset.options import Options
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.fingerprint import fingerprint
from vqclip.tokenizer.folder import CONFIG_FILE, TokenizerFolder
from vqclip.tokenizer.hub import find_folder
from vqclip.tokenizer.loading import load_tokenizer
from vqclip.towers import CaptionLengths

__all__ = ["Progress", "ShardMaker", "allowed_bad", "describe_cuts", "describe_shards"]

_MADE_WITH = ("torch", "torchvision", "pillow", "open_clip_torch", "timm")


class Progress(NamedTuple):
    """Work done since the last one."""

    samples: int
    """Samples read."""
    finished: ShardInfo | None
    """The shard that was written, if one was."""


def describe_shards(facts: Sequence[dict[str, str | int]]) -> tuple[SourceShard, ...]:
    """Return the facts of `ShardedSource.shards` as settings."""
    return tuple(
        SourceShard(
            name=str(shard["name"]),
            size=int(shard["bytes"]),
            samples=int(shard["samples"]),
            sha256=str(shard["sha256"]),
        )
        for shard in facts
    )


def allowed_bad(options: Options, shards: Sequence[SourceShard]) -> int:
    """Return the number of samples that may be unusable."""
    return int(options.tolerance * sum(shard.samples for shard in shards))


def describe_cuts(lengths: CaptionLengths, context_length: int | None) -> str | None:
    """Describe how many captions were cut; None if none was."""
    return None if context_length is None else lengths.describe_cuts(context_length, "the text tower's context_length")


class ShardMaker:
    """Opened tokenizers and the folder that they write to.

    Args:
        options: of the command.
        data: fingerprint of the whole data set.
        shards: all its shards.
        device: of the tokenizers.

    Raises:
        VqclipError: the tokenizers cannot be used, or the folder was begun with other settings.
    """

    def __init__(self, options: Options, data: dict[str, Any], shards: tuple[SourceShard, ...], device: torch.device):
        self._options, self._allowed = options, allowed_bad(options, shards)
        self._encoders, tokenizer = _encoders(options, device)
        self.folder = TokenFolder(options.out, _settings(options, self._encoders, tokenizer, data, shards, device))

    @property
    def lengths(self) -> CaptionLengths:
        """Lengths of the captions encoded so far."""
        return self._encoders.lengths

    @property
    def context_length(self) -> int | None:
        """Longest caption in tokens; None without a text tokenizer."""
        text = self._encoders.text
        return None if text is None else text.preprocess.context_length

    def make(self, source: ShardSamples, shards: Sequence[int], bad: int = 0) -> Iterator[Progress]:
        """Make token shards, in order.

        Args:
            source: reads their samples, by their numbers in the whole data set.
            shards: numbers of the shards.
            bad: number of samples left out before.

        Raises:
            DataError: more samples cannot be used than are allowed, or a shard cannot be read.
        """
        image, options = self._encoders.image, self._options
        batches = ShardBatches(
            source,
            [shard.samples for shard in self.folder.settings.shards],
            shards,
            options.batch_size,
            None if image is None else image.transform,
            0 if image is None else image.tower.image_size,
            options.max_pixels,
        )
        with explain_worker_deaths("tokenize"):
            for shard, parts in _by_shard(batches, options):
                collected = EncodedShard(self._encoders)
                for batch in parts:
                    collected.add(batch)
                    reasons = (str(each["reason"]) for each in collected.bad)
                    require_few_bad(reasons, bad + len(collected.bad), self._allowed, self.folder.bad_option)
                    yield Progress(batch.size, None)
                bad += len(collected.bad)
                yield Progress(0, self.folder.write(shard, collected.records(), len(collected), collected.bad))


def _by_shard(batches: ShardBatches, options: Options) -> Iterator[tuple[int, Iterator[DecodedBatch]]]:
    decoded = ordered_map(
        batches, range(len(batches)), options.workers, timeout_s=options.timeout_s, section="tokenize"
    )
    return itertools.groupby(decoded, key=lambda batch: batch.shard)


def _encoders(options: Options, device: torch.device) -> tuple[Encoders, TokenizerInfo]:
    """Load the tokenizers and describe them, both from one folder in one state."""
    home = find_folder(options.tokenizer)  # once: a name on the hub may mean another model a moment later
    TokenizerFolder.open(home)  # verifies it
    body, _ = read_json(home / CONFIG_FILE)
    image: ImageTokenizer | None = None
    text: TextTokenizer | None = None
    if options.modality in ("image", "both"):
        image = load_tokenizer(home, "image").to(device)
    if options.modality in ("text", "both"):
        text = load_tokenizer(home, "text").to(device)
    for tokenizer in (image, text):
        if tokenizer is not None and not tokenizer.codebook_sizes:
            raise ConfigError(
                f"--tokenizer: the {tokenizer.modality} tokenizer in {options.tokenizer} has no codes (its quantizer "
                "is the identity), so there are no ids; expected one with a codebook"
            )
    if read_json(home / CONFIG_FILE)[0] != body:
        raise CheckpointError(f"{home}: changed while it was loaded; run the command again")
    facts = TokenizerInfo(
        image=None if image is None else fingerprint(image),
        text=None if text is None else fingerprint(text),
        weights=body["weights"]["sha256"],
        config=body["sha256"],
        id_layout=body["id_layout"],
    )
    return Encoders(image, text, options.batch_size, options.precision), facts


def _settings(
    options: Options,
    encoders: Encoders,
    tokenizer: TokenizerInfo,
    data: dict[str, Any],
    shards: tuple[SourceShard, ...],
    device: torch.device,
) -> Settings:
    image, text = encoders.image, encoders.text
    return Settings(
        tokenizer=tokenizer,
        image=None if image is None else _layout(image),
        text=None if text is None else _layout(text),
        batch_size=options.batch_size,
        precision=options.precision,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        threads=options.threads,
        max_pixels=options.max_pixels,
        made_with={name: importlib.metadata.version(name) for name in _MADE_WITH},
        data=data,
        shards=shards,
    )


def _layout(tokenizer: ImageTokenizer | TextTokenizer) -> IdLayout:
    padded = isinstance(tokenizer, TextTokenizer)
    sizes = tokenizer.codebook_sizes
    try:
        return IdLayout(num_tokens=tokenizer.num_tokens, codebook_sizes=sizes, padded=padded)
    except ValidationError as error:
        raise ConfigError(f"--tokenizer: {tokenizer.modality}: {problem_message(error.errors()[0])}") from None
