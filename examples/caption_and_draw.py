"""One small transformer captions images and draws them, and never sees a pixel: image ids in, image ids out.

Prints captions and scores, after about 4 minutes on two CPU cores.

    python examples/caption_and_draw.py runs/captions/tokenizer data/captions_noto_emoji

It reads an image's ids and continues with words, or reads words and continues with the image's ids, one step of the
delayed pattern after another (`vqclip.lm_vocabulary.DelayedCodes`: all codebooks at once, each a step after the one
before). An id is read as its vector in the codebook, and written as a distribution over the codebook's vectors, so that
a few thousand images are enough.

It is trained on the train split alone and judged on the val split by the frozen tokenizer's joint embedding: are the
captions that it gives nearer to their own images than to those of others (*shuffled*), and so the ids that it draws
to their own captions? Both are the likeliest continuations, so nothing is drawn at random after training. `--seed` keys
the first weights, the order of training, the shuffles and the bootstrap over samples.

Shapes: B samples, N tokens, C codebooks, K codes, S = N + C - 1 steps of the delayed pattern, T words, E joint width.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vqclip
from vqclip.data import CaptionShardsConfig, EvalSet
from vqclip.errors import VqclipError
from vqclip.lm_vocabulary import DelayedCodes
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

PAD, BEGIN, END, UNKNOWN = range(4)
TRAINED_STEPS = 6
"""Steps of an image in the drawing loss of one update; all steps would take most of the time."""
COORDINATES = 8
"""Most coordinates that are kept of a codebook's vectors."""


class Pairs(NamedTuple):
    """Tokenized split of the data."""

    ids: Tensor
    """``(B, N, C)`` int64."""
    captions: list[str]
    """B captions."""


def tokenize(tokenizer: ImageTokenizer, shards: Path, limit: int | None) -> Pairs:
    """Encode all images to ids, with their first captions."""
    batches = list(
        EvalSet(CaptionShardsConfig(path=str(shards)).build(), tokenizer.transform, batch_size=256, limit=limit)
    )
    ids = torch.cat([tokenizer.encode(batch.images) for batch in batches])
    return Pairs(ids, [captions[0] for batch in batches for captions in batch.captions])


class Words:
    """Vocabulary of words. A word that is not in the training captions is `UNKNOWN`, which is never written.

    Args:
        captions: of the train split.
    """

    def __init__(self, captions: Sequence[str]):
        words = [self.split(caption) for caption in captions]
        self.names = ["", "", "", "?", *sorted({word for each in words for word in each})]
        self.numbers = {name: number for number, name in enumerate(self.names) if number > UNKNOWN}
        self.length = 2 + max(map(len, words))

    @staticmethod
    def split(caption: str) -> list[str]:
        """Split into words and punctuation, each with the blank before it, so that joining them gives the caption."""
        return re.findall(r" ?\w+| ?[^\w\s]", caption)

    def encode(self, captions: Sequence[str]) -> Tensor:
        """Convert B captions to ``(B, T)`` int64: begin, words, end, padding."""
        rows = [[self.numbers.get(word, UNKNOWN) for word in self.split(caption)] for caption in captions]
        rows = [[BEGIN, *row[: self.length - 2], END] for row in rows]
        return torch.tensor([row + [PAD] * (self.length - len(row)) for row in rows])

    def decode(self, words: Tensor) -> list[str]:
        """Convert ``(B, T)`` to B captions, up to the end mark."""
        rows = [row[: row.index(END)] if END in row else row for row in words.tolist()]
        return ["".join(self.names[word] for word in row).strip() for row in rows]


def coordinates(tokenizer: ImageTokenizer) -> Tensor:
    """Return ``(C, K, r)``: the vectors of each codebook in their principal directions, scaled to unit size."""
    each = []
    for number in range(len(tokenizer.codebook_sizes)):
        vectors = tokenizer.codebook(number)
        left, sizes, _ = torch.linalg.svd(vectors - vectors.mean(dim=0), full_matrices=False)
        each.append(left[:, sizes > 1e-4 * sizes[0]][:, :COORDINATES] * len(vectors) ** 0.5)
    return torch.stack(each)


class CaptionAndDraw(nn.Module):
    """A causal transformer over an image and then words, or words and then an image.

    Args:
        vectors: ``(C, K, r)``, what the ids stand for.
        codes: the delayed pattern.
        steps: S.
        words: how many there are.
        length: T.
    """

    def __init__(self, vectors: Tensor, codes: DelayedCodes, steps: int, words: int, length: int, width: int = 96):
        super().__init__()
        codebooks, _, axes = vectors.shape
        self.pad, self.steps, self.length = codes.pad, steps, length
        # The pad id, which is not a code, is read as zeros. A logit is quadratic in a code's coordinates, so that the
        # likeliest code can be anywhere in the codebook, not only at its rim.
        self.register_buffer("read", F.pad(vectors, (0, 0, 0, 1)))
        self.register_buffer("written", torch.cat([vectors, vectors.square() - 1], dim=-1))
        self.image_in = nn.Linear(codebooks * axes, width)
        self.image_out = nn.Linear(width, codebooks * 2 * axes)
        self.word = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(2, max(steps, length) + 1, width))
        block = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        nn.init.normal_(self.word.weight, std=0.1)

    def embed_images(self, streams: Tensor) -> Tensor:
        """Embed steps ``(B, s, C)`` of an image as ``(B, s, width)``."""
        codebook = torch.arange(streams.shape[2])
        vectors = self.read[codebook, streams].flatten(2)
        return self.image_in(vectors) + self.place[0, 1 : streams.shape[1] + 1]

    def embed_words(self, words: Tensor) -> Tensor:
        """Embed words ``(B, t)`` as ``(B, t, width)``."""
        return self.word(words) + self.place[1, : words.shape[1]]

    def run(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the model's outputs for ``second``, which follows ``first``."""
        both = torch.cat([first, second], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(both.shape[1])
        return self.blocks(both, mask=mask, is_causal=True)[:, first.shape[1] :]

    def caption(self, streams: Tensor, words: Tensor) -> Tensor:
        """Return the logits ``(B, t, words)`` of the next word after each of ``(B, t)``."""
        return self.run(self.embed_images(streams), self.embed_words(words)) @ self.word.weight.T

    def draw(self, words: Tensor, streams: Tensor, steps: Tensor) -> Tensor:
        """Return the logits ``(B, M, C, K)`` of steps ``(M,)`` of an image, given its first steps ``(B, s, C)``."""
        begin = self.place[0, :1].expand(len(words), 1, -1)
        hidden = self.run(self.embed_words(words), torch.cat([begin, self.embed_images(streams)], dim=1))[:, steps]
        towards = self.image_out(hidden).unflatten(-1, (self.written.shape[0], -1))
        return torch.einsum("bmcr,ckr->bmck", towards, self.written)


def train(model: CaptionAndDraw, streams: Tensor, words: Tensor, updates: int, seed: int) -> None:
    """Train both directions together, with AdamW, warmup and decay."""
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(20, updates), pct_start=0.1)
    model.train()
    for update in range(updates):
        some = torch.randint(len(words), (32,), generator=draws)
        steps = torch.randperm(model.steps, generator=draws)[:TRAINED_STEPS]
        seen, said = streams[some], words[some]
        # Now and then a word is hidden, so that the model knows what to do with words that it never met.
        hidden = (torch.rand(said.shape, generator=draws) < 0.1) & (said > UNKNOWN)
        caption = F.cross_entropy(
            model.caption(seen, said[:, :-1]).flatten(0, 1), said[:, 1:].flatten(), ignore_index=PAD
        )
        drawn = model.draw(said.masked_fill(hidden, UNKNOWN), seen[:, :-1], steps)
        draw = F.cross_entropy(drawn.flatten(0, 2), seen[:, steps].flatten(), ignore_index=model.pad)
        optimizer.zero_grad()
        (caption + draw).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (update + 1) % 100 == 0 or update + 1 == updates:
            print(f"update {update + 1}: caption {caption:.2f} nats a word, draw {draw:.2f} nats an id", flush=True)
    model.eval()


@torch.no_grad()
def write_captions(model: CaptionAndDraw, streams: Tensor) -> Tensor:
    """Generate the likeliest words ``(B, T)`` after images ``(B, S, C)``, one at a time."""
    words = torch.full((len(streams), 1), BEGIN)
    for _ in range(model.length - 1):
        logits = model.caption(streams, words)[:, -1]
        logits[:, [PAD, BEGIN, UNKNOWN]] = -torch.inf
        words = torch.cat([words, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return words


@torch.no_grad()
def draw_images(model: CaptionAndDraw, words: Tensor, codes: DelayedCodes) -> Tensor:
    """Generate the likeliest ids ``(B, N, C)`` after words ``(B, T)``, one step at a time."""
    codebooks = len(codes.codebook_sizes)
    blank = codes.to_vocabulary(torch.zeros(1, model.steps - codebooks + 1, codebooks, dtype=torch.int64))
    streams = torch.empty(len(words), 0, codebooks, dtype=torch.int64)
    for step in range(model.steps):
        likeliest = model.draw(words, streams, torch.tensor([step]))[:, 0].argmax(dim=-1)
        outside = blank[:, step] == codes.pad  # where the pattern has no id
        streams = torch.cat([streams, likeliest.masked_fill(outside, codes.pad)[:, None]], dim=1)
    return codes.from_vocabulary(streams)


@torch.no_grad()
def embed_texts(tokenizer: TextTokenizer, captions: Sequence[str]) -> Tensor:
    """Embed captions as ``(B, E)``, from their ids."""
    return tokenizer.embed(tokenizer.encode(captions))


def judge(name: str, made: Tensor, asked: Tensor, true: Tensor, seed: int) -> None:
    """Print the similarity of generated items to their prompts, beside a shuffle of them and the truth.

    Args:
        name: what was made.
        made: ``(B, E)``.
        asked: ``(B, E)``, in the order of ``made``.
        true: ``(B, E)``, the entry of the data in place of ``made``.
        seed: keys the shuffle, in which nothing stays in its place, and the bootstrap.
    """
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(made), generator=draws)
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    own, shuffled, best = ((rows * asked).sum(dim=1).double() for rows in (made, made[other], true))
    margin = own - shuffled
    low, high = interval(margin, draws)
    print(
        f"{name}: cosine {own.mean():.3f}, shuffled {shuffled.mean():.3f}, true {best.mean():.3f}; margin over "
        f"shuffled {margin.mean():.3f}, 95 % interval {low:.3f} to {high:.3f}, n = {len(made)}"
    )


def interval(values: Tensor, draws: torch.Generator, rounds: int = 10_000) -> tuple[float, float]:
    """Return a 95 % interval of the mean of ``(B,)`` paired differences, by a bootstrap over samples."""
    means = [values[torch.randint(len(values), (len(values),), generator=draws)].mean() for _ in range(rounds)]
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975]).to(values)).tolist()
    return low, high


def main(arguments: Sequence[str] | None = None) -> None:
    """Tokenize, train, caption, draw and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts")
    parser.add_argument("data", type=Path, help="folder of caption shards: train/*.tar, val/*.tar")
    parser.add_argument("--updates", type=int, default=500, help="training steps")
    parser.add_argument("--limit", type=int, help="use only so many samples of each split")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)

    image = vqclip.load_tokenizer(options.tokenizer, modality="image")
    text = vqclip.load_tokenizer(options.tokenizer, modality="text")
    trained, held = (tokenize(image, options.data / split, options.limit) for split in ("train", "val"))
    words, codes = Words(trained.captions), DelayedCodes(image.codebook_sizes)
    streams = codes.to_vocabulary(trained.ids)

    torch.manual_seed(options.seed)  # first weights, dropout
    with torch.no_grad():
        vectors = coordinates(image)
    model = CaptionAndDraw(vectors, codes, streams.shape[1], len(words.names), words.length)
    print(f"{len(trained.ids)} training pairs, {sum(each.numel() for each in model.parameters()):,} weights")
    train(model, streams, words.encode(trained.captions), options.updates, options.seed)

    print(f"captioning and drawing {len(held.ids)} held-out pairs", file=sys.stderr)
    captions = words.decode(write_captions(model, codes.to_vocabulary(held.ids)))
    images = draw_images(model, words.encode(held.captions), codes)
    for true, written in list(zip(held.captions, captions, strict=True))[:8]:
        print(f"  {true!r} was captioned {written!r}")
    with torch.no_grad():
        true_images, drawn = image.embed(held.ids), image.embed(images)
    true_texts, written = embed_texts(text, held.captions), embed_texts(text, captions)
    judge("captions", written, true_images, true_texts, options.seed)
    judge("drawings", drawn, true_texts, true_images, options.seed + 1)


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
