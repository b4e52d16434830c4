"""Encode samples to embeddings in three modes with one pass of the tower, shared by ranks; the ids go through a file.

inputs -> tower -> continuous vectors, quantized vectors, ids
                                                           ids -> file -> ids -> embed = codes only

Shapes: B samples of a batch, n all samples of a set, N tokens, C codebooks, K codes a codebook, E embedding width.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from vqclip import dist
from vqclip.errors import CheckpointError, NonFiniteError, ShapeError
from vqclip.evaluation.details import DetailsConfig, Mode
from vqclip.io.tensors import open_tensors, save_tensors
from vqclip.nn.precision import Precision, autocast
from vqclip.process import progress
from vqclip.quantizers import Prefix
from vqclip.tokenizer import TextTokenizer, Tokenizer
from vqclip.towers import CaptionLengths

T = TypeVar("T")

Features = Literal["embedding", "tokens"]
"""embedding: the joint embedding, unit-norm; tokens: the mean of the decoded vectors of all tokens."""

MODES: tuple[Mode, ...] = ("continuous", "quantized", "codes_only")
"""continuous: quantizers bypassed; quantized: the training path; codes_only: ids stored, reloaded and embedded."""


@dataclasses.dataclass(frozen=True)
class RankPartition:
    """Assignment of items ``rank::world_size`` to rank ``rank``; rank 0 of 1 enters no collective."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def create(cls, distributed: bool) -> RankPartition:
        """Return the partition over all ranks (each must evaluate), or over this process alone."""
        return cls(dist.rank(), dist.world_size()) if distributed else cls()

    def indices(self, count: int) -> range:
        """Return the indices of this rank's items out of ``count``."""
        return range(self.rank, count, self.world_size)

    def gather(self, mine: Tensor) -> Tensor:
        """Gather every rank's rows on every rank, in rank order."""
        return mine if self.world_size == 1 else dist.all_gather(mine)

    def gather_rows(self, mine: Tensor) -> Tensor:
        """Gather every rank's rows on every rank, in the order of `indices`.

        If a rank has left out some of its items, its later ones move up, as in `gather_items`.
        """
        if self.world_size == 1:
            return mine
        sizes = dist.gather_sizes(mine)
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        order = [starts[rank] + row for row in range(max(sizes)) for rank in range(len(sizes)) if row < sizes[rank]]
        rows = dist.all_gather(mine, sizes)
        return rows[torch.tensor(order, dtype=torch.int64, device=rows.device)]

    def gather_items(self, mine: list[T]) -> list[T]:
        """Gather every rank's JSON-able values on every rank, in the order of `gather_rows`."""
        if self.world_size == 1:
            return mine
        parts = dist.gather_json(mine)
        return [part[row] for row in range(max(map(len, parts))) for part in parts if row < len(part)]

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """Raise an exception of the block on every rank, as `vqclip.dist.raise_on_all_ranks`; nothing for one rank."""
        return dist.raise_on_all_ranks() if self.world_size > 1 else nullcontext()


@dataclasses.dataclass(frozen=True)
class CodeUsage:
    """Use of one tokenizer's codebooks over a stated number of tokens. JSON-able by `dataclasses.asdict`."""

    samples: int
    """Samples counted."""
    tokens: int
    """Tokens counted, without padding; every other figure is for this number of tokens."""
    codebook_sizes: list[int]
    """K of each codebook."""
    codes_used: list[int]
    """Codes seen at least once, of each codebook."""
    usage: list[float]
    """Share of the codes seen at least once, of each codebook."""
    perplexity: list[float]
    """Exponential of the entropy of the code histogram, of each codebook."""
    bits_per_token: float
    """Capacity of a token: Σ log2 K."""
    bits_used_per_token: float
    """Sum of the entropies of the code histograms, in bits; an upper bound on the information in a token."""
    tokens_per_sample: float
    """Mean number of tokens of a sample."""
    bits_per_sample: float
    """`tokens_per_sample` × `bits_per_token`: the size of a stored sample."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Embeddings of a whole set, the same on every rank."""

    embeddings: dict[Mode, Tensor]
    """Mode → ``(n, E)`` unit-norm (or the mean of the tokens, ``(n, D)``), in the order of the set; without
    `codes_only` if the tokenizer has no codes. After `MODES` come the prefixes of the encoder."""
    usage: CodeUsage | None
    """Use of the codebooks by the set; None without codes."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Remarks for the reader."""
    file: Path | None = None
    """This rank's ids, while the evaluation lasts; None without codes."""
    rows: Tensor | None = None
    """``(m,)`` int64, on the CPU: row of `embeddings` that each sample of `file` has."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Encoder of whole sets over all ranks.

    Args:
        partition: assignment of samples to ranks.
        precision: ``"bf16"`` and ``"fp16"``: autocast type of everything but the quantizers, which stay in fp32.
            ``"fp32"`` and ``"fp64"``: no autocast; the type of the weights decides.
        folder: existing folder of the files of ids.
        features: vector of a sample.
        memo: the newest encoded sets, which the next task may use again.
        details: amounts of the details to make; None: no details.
        prefixes: modality → further modes, in which only a prefix of the stored ids is embedded.
    """

    partition: RankPartition
    precision: Precision
    folder: Path
    features: Features = "embedding"
    memo: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    details: DetailsConfig | None = None
    prefixes: Mapping[str, Mapping[Mode, Prefix]] = dataclasses.field(default_factory=dict)

    def captions(self, tokenizer: TextTokenizer, captions: Sequence[str], batch_size: int, name: str) -> Encoded:
        """Encode ``captions``, the same on every rank; each rank encodes its part."""
        mine, found = [captions[index] for index in self.partition.indices(len(captions))], list[int]()

        def batches() -> Iterator[Tensor]:
            for start in range(0, len(mine), batch_size):
                tokens, lengths = tokenizer.preprocess.with_lengths(mine[start : start + batch_size])
                found.extend(lengths)
                yield tokens

        encoded = self(tokenizer, batches(), name)
        told = CaptionLengths(self.partition.gather_items(found)).describe_cuts(
            tokenizer.preprocess.context_length, "the text tower's context_length"
        )
        rows = torch.tensor(self.partition.indices(len(captions)), dtype=torch.int64)
        return dataclasses.replace(encoded, notes=[told] if told else [], rows=rows)

    def __call__(self, tokenizer: Tokenizer, batches: Iterable[Tensor], name: str) -> Encoded:
        """Encode this rank's ``batches`` and gather the results of all ranks.

        The results do not depend on how samples are batched, up to rounding.

        Args:
            tokenizer: in evaluation mode.
            batches: inputs as `tokenizer.preprocess` makes them, for the items `partition.indices(n)` in this order.
            name: name of the file of ids.

        Raises:
            NonFiniteError: an embedding is NaN or infinite; raised on every rank.
            StopRequested: a rank has been asked to stop (`vqclip.process.progress`); raised on every rank.
        """
        device = tokenizer.device
        sizes = tokenizer.codebook_sizes
        prefixes = self.prefixes.get(tokenizer.modality, {}) if sizes else {}
        shorter = {mode: prefix for mode, prefix in prefixes.items() if prefix != tokenizer.quantizer.extent}
        parts: dict[Mode, list[Tensor]] = {mode: [] for mode in (*(MODES if sizes else MODES[:2]), *shorter)}
        ids = [torch.empty(0, tokenizer.num_tokens, len(sizes), dtype=id_dtype(sizes))]
        path = self.folder / f"{name}-{self.partition.rank}.safetensors"
        with self.partition.raise_on_all_ranks(), torch.no_grad(), autocast(device, self.precision):
            for inputs in batches:
                progress.heartbeat()
                found, quantized, continuous = self._encode(tokenizer, inputs.to(device, non_blocking=True))
                parts["continuous"].append(continuous)
                parts["quantized"].append(quantized)
                ids.append(found.to("cpu", ids[0].dtype))
            if sizes:
                save_ids(path, torch.cat(ids), sizes)
                # In the same batches, so that both paths run the same kernels and are equal bit for bit.
                for batch in load_ids(path, sizes).split([len(part) for part in ids[1:]]):
                    progress.heartbeat()
                    found = batch.to(device, torch.int64)
                    parts["codes_only"].append(self._decode(tokenizer, found))
                    for mode, prefix in shorter.items():
                        parts[mode].append(self._decode(tokenizer, tokenizer.truncate(found, *prefix)))
        dtype = torch.float64 if next(tokenizer.parameters()).dtype == torch.float64 else torch.float32
        width = tokenizer.embed_dim if self.features == "embedding" else tokenizer.pool.position.shape[1]
        empty = torch.empty(0, width, dtype=dtype, device=device)
        whole = {mode: self.partition.gather_rows(torch.cat([empty, *part])) for mode, part in parts.items()}
        _check_finite(whole, tokenizer)
        whole |= {mode: whole["codes_only"] for mode in prefixes if mode not in shorter}
        if not sizes:
            return Encoded(whole, None)
        stored = torch.cat(ids)
        samples = int(self.partition.gather(torch.tensor([len(stored)], device=device)).sum())
        counts = count_codes(stored, lambda mine: self.partition.gather(mine.to(device)))
        return Encoded(whole, code_usage(counts, sizes, samples), file=path)

    def _encode(self, tokenizer: Tokenizer, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, quantized and continuous vectors of a batch."""
        if self.features == "embedding":
            out, continuous = tokenizer.with_continuous(inputs)
            return out.ids, out.embedding, continuous
        x, mask = tokenizer.features(inputs)
        coded = tokenizer.quantizer(x, mask)
        plain = tokenizer.quantizer.continuous(x, mask)
        return coded.ids, _mean_token(tokenizer, coded.vectors, mask), _mean_token(tokenizer, plain, mask)

    def _decode(self, tokenizer: Tokenizer, ids: Tensor) -> Tensor:
        if self.features == "embedding":
            return tokenizer.embed(ids, self.precision)
        return _mean_token(tokenizer, tokenizer.quantizer.decode(ids), tokenizer.ids_mask(ids))


def _mean_token(tokenizer: Tokenizer, vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean ``(B, D)`` of the tokens that the quantizer's vectors decode to, without absent ones."""
    tokens = tokenizer.project_out(vectors.to(tokenizer.pool.position.dtype), mask)
    tokens = tokens if tokens.dtype == torch.float64 else tokens.float()
    if mask is None:
        return tokens.mean(dim=1)
    real = mask.unsqueeze(-1)
    return (tokens * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


def _check_finite(embeddings: dict[Mode, Tensor], tokenizer: Tokenizer) -> None:
    for mode, rows in embeddings.items():
        bad = int((~rows.isfinite()).any(dim=1).sum())
        if bad:  # comparisons with NaN are false, so NaN would rank as perfect
            raise NonFiniteError(
                f"evaluation: {bad} of {len(rows)} {mode} {tokenizer.modality} embeddings are NaN or infinite; "
                "expected finite ones: check the weights, or use a higher precision"
            )


def id_dtype(codebook_sizes: Sequence[int]) -> torch.dtype:
    """Return the smallest signed integer type that holds every id and -1."""
    largest = max(codebook_sizes, default=1) - 1
    for dtype in (torch.int8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def save_ids(path: Path, ids: Tensor, codebook_sizes: Sequence[int]) -> None:
    """Write ids ``(B, N, C)``, -1 for absent tokens, in the smallest integer type that holds them (safetensors)."""
    if ids.ndim != 3 or ids.shape[2] != len(codebook_sizes):
        raise ShapeError(f"ids: got shape {tuple(ids.shape)}, expected (B, N, {len(codebook_sizes)})")
    small = ids.to("cpu", id_dtype(codebook_sizes)).contiguous()
    save_tensors({"ids": small}, path, metadata={"codebook_sizes": json.dumps(list(codebook_sizes))})


def load_ids(path: Path, codebook_sizes: Sequence[int]) -> Tensor:
    """Read what `save_ids` wrote: ``(B, N, C)`` in the stored integer type.

    Raises:
        CheckpointError: the file is missing or damaged, or was written for other codebooks.
    """
    try:
        with open_tensors(path) as file:
            stored = json.loads((file.metadata() or {}).get("codebook_sizes", "null"))
            ids = file.get_tensor("ids")
    except (CheckpointError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: ids cannot be read: {error}") from error
    if stored != list(codebook_sizes):
        raise CheckpointError(f"{path}: got ids of codebooks of sizes {stored}, expected {list(codebook_sizes)}")
    return ids


def count_codes(ids: Tensor, gather: Callable[[Tensor], Tensor] = lambda mine: mine) -> list[Tensor]:
    """Count ids ``(B, N, C)`` exactly: for each codebook, the counts of the ids that occur, in their order.

    Memory does not depend on the size of the codebooks. Negative ids are not counted.

    Args:
        ids: of this rank.
        gather: function that concatenates the rows of all ranks.
    """
    found = []
    for column in ids.reshape(-1, ids.shape[-1]).unbind(-1):
        mine = torch.unique(column[column >= 0].long(), return_counts=True)
        codes, counts = map(gather, mine)
        distinct, place = torch.unique(codes, return_inverse=True)
        found.append(torch.zeros_like(distinct).index_add_(0, place, counts))
    return found


def code_usage(counts: Sequence[Tensor], codebook_sizes: Sequence[int], samples: int) -> CodeUsage:
    """Return the statistics of counts ``(U_c,)`` of the codes in each codebook.

    Args:
        counts: int64, count of each code that occurs, one tensor for each codebook.
        codebook_sizes: K of each.
        samples: number of samples that the tokens come from.
    """
    tokens = int(counts[0].sum())
    entropies = [float(torch.special.entr(each.double() / max(1, tokens)).sum()) for each in counts]
    used = [len(each) for each in counts]
    bits = math.fsum(math.log2(size) for size in codebook_sizes)
    per_sample = tokens / max(1, samples)
    return CodeUsage(
        samples=samples,
        tokens=tokens,
        codebook_sizes=list(codebook_sizes),
        codes_used=used,
        usage=[number / size for number, size in zip(used, codebook_sizes, strict=True)],
        perplexity=[math.exp(entropy) for entropy in entropies],
        bits_per_token=bits,
        bits_used_per_token=math.fsum(entropies) / math.log(2),
        tokens_per_sample=per_sample,
        bits_per_sample=per_sample * bits,
    )
