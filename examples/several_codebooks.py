"""Four language models of image ids with several codebooks, at equal training time: which one describes images best?

Prints a line for each model: about 5 minutes on two CPU cores for each seed.

    python examples/several_codebooks.py runs/captions/tokenizer data/captions_noto_emoji
    python examples/several_codebooks.py runs/base/tokenizer

Without a folder of data the drawn data set is used. Every model is the same causal transformer, which reads the joint
embedding of a caption's codes and then the image, and differs in how a token's C codes are read and written:

    flat       one code a step, N·C steps: `FlatCodes`, the ids of a usual vocabulary; each step predicts the codes of
               its own codebook only, which costs a C-th of a softmax over the whole vocabulary and is never worse
    parallel   one token a step, N steps: `CodesEmbedding`, and `CodesHead` with all codes at once
    depth      the same with `CodesHead` of kind depth, one code after another by a small transformer
    bits       the same with `MaskedBitsHead`: bits (or `--levels`) of all codes of a token, in a few steps

The figure is the loss of an image in nats: -log p summed over all of its codes, which means the same for all four. For
bits it is that of drawing a token in `--steps` steps, whose order is fixed.
Each model trains for equal processor time on one thread (evaluation is not counted). A twentieth of the training images
is held out to choose when to stop; the val split is used once, with those weights. *independent* is what a table of the
frequencies of each place and codebook reaches. `--seed` keys the first weights, the order of training and dropout.

Shapes: B samples, N tokens, C codebooks, K codes of one, H width of the transformer, E joint width.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vqclip
from vqclip.data import CaptionShardsConfig, EvalSet, ScenesSourceConfig
from vqclip.errors import VqclipError
from vqclip.lm_vocabulary import CodesEmbedding, CodesHeadConfig, MaskedBitsHeadConfig
from vqclip.seeds import derive_seed

KINDS = ("flat", "parallel", "depth", "bits")
BATCH = {"flat": 8, "parallel": 32, "depth": 32, "bits": 32}
WARMUP = 50
CHECKS = 8
"""Evaluations of the held-out images in a training."""


class Pairs(NamedTuple):
    """Tokenized split of the data."""

    ids: Tensor
    """``(B, N, C)`` int64."""
    texts: Tensor
    """``(B, E)``, embeddings of the captions' codes."""


@torch.no_grad()
def tokenize(
    folder: str, data: CaptionShardsConfig | ScenesSourceConfig, limit: int | None
) -> tuple[Pairs, tuple[int, ...]]:
    """Encode all images and their first captions; return the sizes of the image codebooks too."""
    image, text = (vqclip.load_tokenizer(folder, modality=modality) for modality in ("image", "text"))
    batches = list(EvalSet(data.build(), image.transform, batch_size=256, limit=limit))
    ids = [image.encode(batch.images) for batch in batches]
    texts = [text.embed(text.encode([captions[0] for captions in batch.captions])) for batch in batches]
    return Pairs(torch.cat(ids), torch.cat(texts)), image.codebook_sizes


class LanguageModel(nn.Module):
    """A causal transformer over an image's tokens (or codes), after the embedding of its caption.

    Args:
        kind: one of `KINDS`.
        sizes: K of each codebook.
        tokens: N.
        text_width: E.
        width: H.
        layers: blocks.
        digits: levels and steps of `MaskedBitsHeadConfig`.
    """

    def __init__(
        self,
        kind: str,
        sizes: tuple[int, ...],
        tokens: int,
        text_width: int,
        width: int,
        layers: int,
        digits: tuple[Sequence[int] | None, int] = (None, 16),
    ):
        super().__init__()
        self.kind = kind
        self.text = nn.Linear(text_width, width)
        self.codes = CodesEmbedding(sizes, width)
        steps = tokens * len(sizes) if kind == "flat" else tokens
        self.place = nn.Parameter(0.02 * torch.randn(steps, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        mask = torch.full((steps, steps), float("-inf")).triu(diagonal=1)
        self.register_buffer("mask", mask, persistent=False)
        if kind == "bits":
            levels, steps = digits
            self.head = MaskedBitsHeadConfig(
                codebook_sizes=sizes, width=width, levels=levels, steps=steps, dropout=0.1
            ).build()
        else:
            head = "depth" if kind == "depth" else "parallel"
            self.head = CodesHeadConfig(
                kind=head, codebook_sizes=sizes, width=width, dropout=0.1, depth_width=64, depth_layers=1
            ).build()

    def hidden(self, ids: Tensor, texts: Tensor) -> Tensor:
        """Return the hidden state that predicts each step: ``(B, N, H)``, or ``(B, N·C, H)`` if flat."""
        codes = self.codes.each(ids)
        read = codes.flatten(1, 2) if self.kind == "flat" else codes.sum(dim=2)
        x = torch.cat([self.text(texts)[:, None], read[:, :-1]], dim=1) + self.place
        return self.blocks(x, mask=self.mask, is_causal=True)

    def forward(self, ids: Tensor, texts: Tensor) -> Tensor:
        """Return the loss of each image ``(B,)``, in nats."""
        hidden = self.hidden(ids, texts)
        if self.kind != "flat":
            return self.head.nats(hidden, ids).sum(dim=(1, 2))
        hidden = hidden.unflatten(1, ids.shape[1:])
        return sum(
            nn.functional.cross_entropy(output(hidden[:, :, c]).flatten(0, 1), ids[..., c].flatten(), reduction="none")
            .view(len(ids), -1)
            .sum(dim=1)
            for c, output in enumerate(self.head.outputs)
        )

    def loss(self, ids: Tensor, texts: Tensor, seed: int) -> Tensor:
        """Return what training minimises, in nats a code; ``seed`` keys the bits that are hidden."""
        if self.kind == "bits":
            return self.head(self.hidden(ids, texts), ids, seed)
        return self(ids, texts).mean() / ids[0].numel()


class Training(NamedTuple):
    """Settings of a training."""

    seconds: float
    """Processor time."""
    batch: int
    """Images a step."""
    lr: float
    """Learning rate after `WARMUP` steps."""


class Outcome(NamedTuple):
    """Result of one training."""

    val: float
    """Loss of the val images, in nats an image."""
    best_at: float
    """Seconds of training at the weights that were chosen."""
    steps: int
    """Training steps in all."""


@torch.no_grad()
def evaluate(model: LanguageModel, pairs: Pairs) -> float:
    """Return the mean loss of an image, in nats."""
    model.eval()
    losses = [model(ids, texts) for ids, texts in zip(pairs.ids.split(100), pairs.texts.split(100), strict=True)]
    model.train()
    return float(torch.cat(losses).double().mean())


def train(model: LanguageModel, pairs: Pairs, held: Pairs, val: Pairs, how: Training, seed: int) -> Outcome:
    """Train for some seconds of processor time, and evaluate the weights with the smallest loss on ``held``."""
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=0.05, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    best, best_at, chosen, spent, steps = float("inf"), 0.0, copy.deepcopy(model.state_dict()), 0.0, 0
    model.train()
    for check in range(1, CHECKS + 1):
        began = time.process_time()
        while spent + time.process_time() - began < how.seconds * check / CHECKS:
            some = torch.randint(len(pairs.ids), (how.batch,), generator=draws)
            loss = model.loss(pairs.ids[some], pairs.texts[some], derive_seed(seed, steps))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            steps += 1
        spent += time.process_time() - began
        found = evaluate(model, held)
        if found < best:
            best, best_at, chosen = found, spent, copy.deepcopy(model.state_dict())
    model.load_state_dict(chosen)
    return Outcome(evaluate(model, val), best_at, steps)


def independent(pairs: Pairs, val: Pairs, sizes: Sequence[int]) -> float:
    """Return the loss of the val images under the frequencies of each place and codebook (one added to each count)."""
    total = 0.0
    for c, size in enumerate(sizes):
        counts = torch.stack([torch.bincount(column, minlength=size) for column in pairs.ids[..., c].T]).double() + 1
        log_p = (counts / counts.sum(dim=1, keepdim=True)).log()
        total -= float(log_p.gather(1, val.ids[..., c].T).sum()) / len(val.ids)
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Tokenize, train four models with each seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts")
    parser.add_argument("data", type=Path, nargs="?", help="folder of caption shards: train/*.tar, val/*.tar")
    parser.add_argument("--seconds", type=float, default=40, help="training time of each model")
    parser.add_argument("--seeds", type=int, default=1, help="number of trainings of each model")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--batch", type=int, help="images a step; the default is the best one found for each model")
    parser.add_argument("--width", type=int, default=96, help="of the transformer")
    parser.add_argument("--layers", type=int, default=3, help="of the transformer")
    parser.add_argument("--levels", type=int, nargs="+", help="of the FSQ whose digits `bits` predicts; default: bits")
    parser.add_argument("--steps", type=int, default=24, help="in which `bits` draws a token")
    parser.add_argument("--limit", type=int, help="use only so many samples of each split")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    torch.set_num_threads(1)

    splits = []
    for split in ("train", "val"):
        data = (
            ScenesSourceConfig(split=split)
            if options.data is None
            else CaptionShardsConfig(path=str(options.data / split))
        )
        pairs, sizes = tokenize(options.tokenizer, data, options.limit)
        splits.append(pairs)
    every, val = splits
    held_out = max(1, len(every.ids) // 20)
    order = torch.randperm(len(every.ids), generator=torch.Generator().manual_seed(0))
    held, pairs = (Pairs(every.ids[some], every.texts[some]) for some in (order[:held_out], order[held_out:]))
    _, tokens, codebooks = every.ids.shape
    print(
        f"{len(pairs.ids)} training images, {len(held.ids)} to choose when to stop, {len(val.ids)} of val; {tokens} "
        f"tokens of {codebooks} codebooks of {min(sizes)} to {max(sizes)} codes"
    )
    print(f"independent: {independent(pairs, val, sizes):.1f} nats an image")
    for kind in options.kinds:
        how, found = Training(options.seconds, options.batch or BATCH[kind], options.lr), []
        for seed in range(options.seed, options.seed + options.seeds):
            print(f"training: {kind}, seed {seed}, {options.seconds:g} s of processor time", file=sys.stderr)
            torch.manual_seed(seed)  # first weights, dropout
            digits = options.levels, options.steps
            model = LanguageModel(kind, sizes, tokens, val.texts.shape[1], options.width, options.layers, digits)
            found.append(train(model, pairs, held, val, how, seed))
        losses = [each.val for each in found]
        print(
            f"{kind}: {statistics.mean(losses):.1f} nats an image ({min(losses):.1f} to {max(losses):.1f}), "
            f"{found[0].steps} steps, best after {statistics.mean(each.best_at for each in found):.0f} of "
            f"{options.seconds:g} s, {sum(each.numel() for each in model.parameters()):,} weights",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
