"""Tokenize a data set: each input shard becomes one token shard, made by the process that claims it.

    index the shards together                   # a collective; from here on no process waits for another
    folder = work folder: tokenizer, data, versions; refused if it was begun with others
    for shard in folder.claim():
        batches, decoded in workers -> ids -> Parquet file -> record of the shard
    manifest                                    # as soon as every shard is finished

The bytes of a token shard depend on the settings and the shard alone, so any processes, on any engine, write the same.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, ValidationError

from vqclip import dist
from vqclip.config import Config
from vqclip.data import ShardedSource, SourceConfigBase, prepare_sources
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.in_order import require_few_bad
from vqclip.data.libraries import require_pyarrow
from vqclip.data.tokens import SUFFIX, IdLayout, Manifest, TokenRecord, write_shard
from vqclip.data.tokens.manifest import VERSIONS, Settings, ShardInfo, SourceShard, TokenizerInfo
from vqclip.data.work_folder import BAD_FILE, FolderLayout, WorkFolder
from vqclip.data.workers import explain_worker_deaths, ordered_map
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.json_files import problem_message, read_json
from vqclip.nn.precision import Precision
from vqclip.process.memory import keep_freed_memory
from vqclip.runlog.bar import ProgressBar
from vqclip.tokenize_dataset.encode import Encoders, ShardBatches, ShardSamples
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.tokenizer.fingerprint import fingerprint
from vqclip.tokenizer.folder import CONFIG_FILE, TokenizerFolder
from vqclip.tokenizer.hub import find_folder
from vqclip.tokenizer.loading import load_tokenizer
from vqclip.towers import CaptionLengths

__all__ = ["LAYOUT", "Options", "ShardMaker", "TokenizeResult", "finish_folder", "tokenize"]

LAYOUT = FolderLayout(VERSIONS, SUFFIX, command="vqclip tokenize", option="--out")
"""Layout of the work folder."""
_MADE_WITH = ("torch", "torchvision", "simplejpeg", "pillow", "open_clip_torch", "timm", "pyarrow")


class Options(Config):
    """Options of `vqclip tokenize`."""

    tokenizer: str
    """Tokenizer folder, or hub name."""
    data: SourceConfigBase
    """The data set."""
    out: Path
    """Folder of the token shards."""
    modality: Literal["image", "text", "both"] = "both"
    """Data to tokenize."""
    batch_size: Annotated[int, Field(ge=1, le=2**16)] = 64
    """Samples in a batch; the last batch of a shard is padded."""
    workers: Annotated[int, Field(ge=0, le=512)] = 0
    """Worker processes that decode images, for each process of the job."""
    precision: Precision = "fp32"
    """fp32: in the type of the weights; bf16, fp16: under autocast; fp64: everything in float64, several times slower,
    but batch size, threads and machine change ids about half a billion times less often."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of each process on the CPU; more processes are faster than more threads."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Largest share of samples that may be unusable; they are left out."""
    max_pixels: int = MAX_PIXELS
    """Larger images are unusable."""
    timeout_s: float = 240.0
    """Longest wait for a worker."""

    def require_few_bad(self, reasons: Sequence[str], more: int, samples: int) -> None:
        """Raise DataError if more samples of a data set are unusable than are allowed.

        Args:
            reasons: why; the message shows some.
            more: number of further ones.
            samples: samples of the data set.
        """
        require_few_bad(reasons, len(reasons) + more, int(self.tolerance * samples), "--tolerance")


@dataclass(frozen=True)
class TokenizeResult:
    """Work of one process on a folder of token shards, or of all workers of Ray."""

    made: int
    """Number of shards it made."""
    found: int
    """Number of shards that were finished before it began."""
    samples: int
    """Number of samples it read."""
    seconds: float
    """Time from the first sample."""
    missing: int
    """Number of shards that others have not finished yet."""
    manifest: Manifest | None
    """The manifest, if all shards are finished."""
    cut: str | None
    """Message on captions that were cut; None if none was, or shards are missing."""

    def describe(self, out: Path, who: str = "") -> str:
        """Return the work in words, for the folder `out`; `who` names the process, before its lines."""
        rate = f"; {self.samples / self.seconds:.0f} samples/s" if self.samples else ""
        text = f"{who}shards: {self.made} written, {self.found} already finished{rate}"
        manifest = self.manifest
        if manifest is None:
            return f"{text}\n{who}{self.missing} shards are left to other processes, or to the same command run again"
        size, left_out = sum(shard.size for shard in manifest.shards), sum(manifest.bad.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in manifest.bad.items())
        bad = f", {left_out} left out ({kinds}; see {BAD_FILE})" if left_out else ""
        text += f"\n{who}{self.cut}" if self.cut else ""
        return (
            f"{text}\n{out}: {manifest.samples:,} samples in {len(manifest.shards)} shards, {size / 1e6:,.1f} MB{bad}"
        )


def tokenize(options: Options) -> TokenizeResult:
    """Tokenize what no other process has done or is doing; under torchrun all processes share the shards.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    require_pyarrow()  # now, not after the first shard
    device = dist.choose_device(options.device, "--device")
    torch.set_num_threads(options.threads)
    dist.init(device)
    try:
        prepare_sources([options.data])
        rank, world_size = dist.rank(), dist.world_size()
    finally:
        dist.shutdown()
    if device.type == "cpu":
        keep_freed_memory()
    built = options.data.build()
    if not hasattr(built, "key"):
        raise ConfigError(f"--data: kind {options.data.kind} has no shards; write some first (vqclip data pack)")
    source = cast(ShardedSource, built)
    maker = ShardMaker(options, source.fingerprint, source.shards, device)
    folder, sizes = maker.folder, [len(ids) for ids in maker.ids]
    for shard in range(rank, len(sizes), world_size):
        maker.find_finished(shard)
    records = [folder.record(shard) for shard in range(len(sizes))]
    bad = sum(len(record.bad) for record in records if record is not None)
    left = [shard for shard, record in enumerate(records) if record is None]
    seen = made = 0
    # Processes claim shards in order, so what comes before a claimed one is done or in work.
    before = dict(zip(left, accumulate((sizes[shard] for shard in left), initial=0), strict=False))
    start, done = time.monotonic(), sum(sizes) - sum(sizes[shard] for shard in left)
    position = done
    with ProgressBar(sum(sizes), done, rank == 0, "tokenize", "sample") as bar:
        for shard in folder.claim(left):
            bar.advance(done + before[shard] - position)
            position = done + before[shard]
            for count in maker.make(source, shard, 0, bad):
                seen, position = seen + count, position + count
                bar.advance(count)
                bar.show()
            record = folder.record(shard)
            bad, made = bad + (0 if record is None else len(record.bad)), made + 1
    return finish_folder(options, folder, made, len(sizes) - len(left), seen, time.monotonic() - start)


class ShardMaker:
    """Loaded tokenizers, and the work folder that they write to.

    Args:
        options: of the command.
        data: fingerprint of the whole data set.
        facts: `ShardedSource.shards` of the whole data set.
        device: of the tokenizers.

    Attributes:
        folder: the work folder.
        ids: numbers of the samples of each shard in the whole data set.

    Raises:
        VqclipError: the tokenizers cannot be used, or the folder was begun with other settings.
    """

    def __init__(self, options: Options, data: dict[str, Any], facts: Sequence[dict[str, Any]], device: torch.device):
        shards = tuple(map(SourceShard.model_validate, facts))
        self._options = options
        self._encoders, tokenizer = _load_encoders(options, device)
        image, text = self._encoders.image, self._encoders.text
        self._settings = Settings(
            tokenizer=tokenizer,
            image=None if image is None else _layout(image),
            text=None if text is None else _layout(text),
            context_length=None if text is None else text.preprocess.context_length,
            batch_size=options.batch_size,
            precision=options.precision,
            device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
            threads=options.threads,
            max_pixels=options.max_pixels,
            made_with={name: importlib.metadata.version(name) for name in _MADE_WITH},
            data=data,
            shards=shards,
        )
        self.folder = WorkFolder(options.out, self._settings.model_dump(mode="json"), len(shards), LAYOUT)
        ends = accumulate((shard.samples for shard in shards), initial=0)
        self.ids = [range(start, start + shard.samples) for start, shard in zip(ends, shards, strict=False)]

    def find_finished(self, shard: int) -> bool:
        """Return whether a shard is finished and undamaged; one that is damaged is forgotten, to be made again."""
        if self.folder.record(shard, verify=True) is None:
            self.folder.forget(shard)
            return False
        return True

    def make(self, source: ShardSamples, shard: int, first: int, bad: int = 0) -> Iterator[int]:
        """Make a token shard that this process has claimed; yield the number of samples read since the last time.

        Args:
            source: reads the samples.
            shard: number of the shard.
            first: number of the source's first sample in the whole data set.
            bad: number of samples left out before.

        Raises:
            DataError: more samples cannot be used than are allowed, or the shard cannot be read.
        """
        image, options, settings = self._encoders.image, self._options, self._settings
        batches = ShardBatches(
            source,
            self.ids[shard],
            first,
            options.batch_size,
            None if image is None else image.transform,
            0 if image is None else image.tower.image_size,
            options.max_pixels,
        )
        records: list[TokenRecord] = []
        left_out: list[dict[str, Any]] = []
        with explain_worker_deaths("tokenize"):
            for batch in ordered_map(
                batches, range(len(batches)), options.workers, timeout_s=options.timeout_s, section="tokenize"
            ):
                left_out += batch.bad
                options.require_few_bad([each["reason"] for each in left_out], bad, self.ids[-1].stop)
                records += self._encoders.encode_images(batch)
                self.folder.renew()
                yield len(batch.ids)
        whole, lengths = self._encoders.encode_captions(records, self.folder.renew)
        file = self.folder.write(shard, lambda file: write_shard(file, whole, settings.image, settings.text))
        self.folder.add_record(shard, file, len(whole), left_out, lengths=sorted(lengths.items()))


def finish_folder(
    options: Options, folder: WorkFolder, made: int, found: int, samples: int, seconds: float
) -> TokenizeResult:
    """Write the manifest if every shard is finished, and return the work; arguments as of `TokenizeResult`.

    Raises:
        DataError: more samples were left out than are allowed; the message names some.
    """
    records, settings = folder.records(), Settings.model_validate(folder.settings)
    if records is None:
        return TokenizeResult(made, found, samples, seconds, folder.missing(), None, None)
    bad = [each for record in records for each in record.bad]
    options.require_few_bad([each.reason for each in bad], 0, sum(shard.samples for shard in settings.shards))
    shards = tuple(
        ShardInfo(
            name=record.name,
            size=record.file.size,
            sha256=record.file.sha256,
            samples=record.samples,
            bad=_count_kinds(each.kind for each in record.bad),
        )
        for record in records
    )
    manifest = Manifest(
        settings=settings,
        samples=sum(shard.samples for shard in shards),
        bad=_count_kinds(each.kind for each in bad),
        shards=shards,
    )
    folder.finish(records, manifest.model_dump(mode="json"))
    cut = None
    if settings.context_length is not None:
        lengths = CaptionLengths()
        for record in records:
            lengths.update(dict(record.facts["lengths"]))
        cut = lengths.describe_cuts(settings.context_length, "the text tower's context_length")
    return TokenizeResult(made, found, samples, seconds, 0, manifest, cut)


def _count_kinds(kinds: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(kinds).items()))


def _load_encoders(options: Options, device: torch.device) -> tuple[Encoders, TokenizerInfo]:
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


def _layout(tokenizer: ImageTokenizer | TextTokenizer) -> IdLayout:
    padded = isinstance(tokenizer, TextTokenizer)
    sizes = tokenizer.codebook_sizes
    try:
        return IdLayout(num_tokens=tokenizer.num_tokens, codebook_sizes=sizes, padded=padded)
    except ValidationError as error:
        raise ConfigError(f"--tokenizer: {tokenizer.modality}: {problem_message(error.errors()[0])}") from None
