"""The folder of token shards; see `vqclip.data.shard_folder`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vqclip.data.shard_folder import ShardFolder, ShardRecord
from vqclip.data.tokens import SUFFIX, Manifest, TokenRecord, write_shard
from vqclip.data.tokens.manifest import VERSIONS, Settings, ShardInfo

__all__ = ["TokenFolder"]


class TokenFolder(ShardFolder[ShardRecord, Manifest]):
    """A folder of token shards that is being made, one for every input shard.

    Args:
        folder: the folder; made if it is missing.
        settings: everything that determines its bytes.

    Raises:
        ConfigError: it was begun with other settings, which the message shows, or contains something else.
    """

    command = "vqclip tokenize"
    versions = VERSIONS
    suffixes = (SUFFIX,)
    bad_option = "--tolerance"
    record_type = ShardRecord

    def __init__(self, folder: Path, settings: Settings):
        self.settings = settings
        super().__init__(folder, settings, len(settings.shards))

    def name(self, shard: int) -> str:
        """Return the file name of a token shard."""
        return f"{shard:05d}{SUFFIX}"

    def write(self, shard: int, records: Iterable[TokenRecord], count: int, bad: Iterable[Any]) -> ShardInfo:
        """Write a token shard of ``count`` samples, and then its record; arguments and result as of `add_record`."""
        file = self.write_file(shard, lambda file: write_shard(file, records, self.settings.image, self.settings.text))
        return self.add_record(shard, file, count, bad)

    def make_manifest(self, records: Sequence[ShardRecord], samples: int, bad: dict[str, int]) -> Manifest:
        """Return the manifest; see `ShardFolder.make_manifest`."""
        shards = tuple(record.facts for record in records)
        return Manifest(settings=self.settings, samples=samples, bad=bad, shards=shards)
