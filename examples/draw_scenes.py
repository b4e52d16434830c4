"""Words to images by ids alone: generators draw scenes, and a judge that saw real images only names what it sees.

Prints a table of shares, after about 15 minutes on two CPU cores.

    python examples/draw_scenes.py runs/pixels/tokenizer
    python examples/draw_scenes.py runs/pixels/tokenizer --sheet drawn.png

    words → text ids → image ids → pixels → judge

The *masked* generator reads the text ids' vectors and fills in all image ids in a few rounds, each given those of
earlier rounds (MaskGIT, Chang et al. 2022, https://arxiv.org/abs/2202.04200). The others draw one token after another,
and all ids of a token by a head of `vqclip.lm_vocabulary`: *depth*, id after id, or *bits*, a few bits of all ids at a
time (`MaskedBitsHead`). All are guided by the difference that the text makes (Ho and Salimans 2022,
https://arxiv.org/abs/2207.12598), learn from ids and captions of training scenes alone, and never see a pixel.

The judge is a small convolutional network that names number, colour and shape of the objects. It is trained on real
images only, and judges new scenes of one, two or three equal objects: real, reconstructed from their ids, and drawn
from their captions. *Chance*: the drawings, each with the caption of another one. `--seed` keys the first weights, the
order of training and all draws.

Shapes: B samples, N tokens, C codebooks, K codes, r coordinates of a code, T text tokens, D their width.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from caption_and_draw import coordinates
from PIL import Image
from torch import Tensor, nn

import vqclip
from vqclip.errors import ConfigError, VqclipError
from vqclip.io.atomic import write_file
from vqclip.lm_vocabulary import CodesHead, CodesHeadConfig, MaskedBitsHead, MaskedBitsHeadConfig
from vqclip.scenes.captions import describe
from vqclip.scenes.drawing import SHAPES, draw_scene
from vqclip.scenes.scene import COLOURS, Draws, sample_scene
from vqclip.scenes.splits import TRAIN_DETAIL, TRAINED, train_samples
from vqclip.tokenizer import ImageTokenizer

GENERATORS = ("masked", "depth", "bits")
NUMBERS = 3
"""Most objects of a scene."""
CODEBOOKS = 3
"""Codebooks in the loss of one update of the masked generator; all would take most of the time."""


class Scenes(NamedTuple):
    """Scenes of equal objects, with their captions."""

    images: Tensor
    """``(B, 3, S, S)`` uint8."""
    captions: list[str]
    """B captions."""
    kinds: Tensor
    """``(B, 3)`` int64: number of objects less one, colour, shape."""


def scenes_of_one_kind(seed: int, count: int, size: int) -> Scenes:
    """Draw scenes of one, two and three equal objects in turn, of each colour and shape that the tokenizer has seen."""
    images, captions, kinds = [], [], []
    for index in range(count):
        draws = Draws(seed, index)
        number, (colour, shape) = index % NUMBERS, TRAINED[index // NUMBERS % len(TRAINED)]
        scene = sample_scene(draws, (colour, shape), [(colour, shape)], {number + 1: 1.0})
        captions.append(describe(scene, draws, TRAIN_DETAIL)[0])
        images.append(torch.from_numpy(draw_scene(scene, size, draws)).permute(2, 0, 1))
        kinds.append((number, list(COLOURS).index(colour), SHAPES.index(shape)))
    return Scenes(torch.stack(images), captions, torch.tensor(kinds))


@torch.no_grad()
def training_ids(tokenizer: ImageTokenizer, count: int) -> tuple[Tensor, list[str]]:
    """Return ids ``(B, N, C)`` and captions of scenes of all kinds."""
    ids, captions = [], list[str]()
    samples = train_samples(0, count, tokenizer.tower.image_size)
    while some := list(itertools.islice(samples, 250)):
        ids.append(tokenizer.encode(torch.stack([torch.from_numpy(each.pixels).permute(2, 0, 1) for each in some])))
        captions += [each.caption or "" for each in some]
    return torch.cat(ids), captions


@torch.no_grad()
def in_batches(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function to some rows at a time."""
    return torch.cat([function(part) for part in rows.split(100)])


def fit(model: nn.Module, loss: Callable[[Tensor], Tensor], updates: int, samples: int, lr: float, seed: int) -> None:
    """Train with AdamW, warmup and decay; ``loss`` takes the rows ``(B,)`` of an update."""
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, betas=(0.9, 0.96))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=max(20, updates), pct_start=0.1)
    model.train()
    began = time.process_time()
    for update in range(1, updates + 1):
        optimizer.zero_grad()
        value = loss(torch.randint(samples, (64,), generator=draws))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 200 == 0 or update == updates:
            print(f"  update {update}: {value:.3f} nats, {time.process_time() - began:.0f} s", flush=True)
    model.eval()


class Judge(nn.Module):
    """Images → logits of number, colour and shape."""

    def __init__(self) -> None:
        super().__init__()
        widths, layers = (3, 24, 48, 96, 128), list[nn.Module]()
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU()]
            layers += [nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(4, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(2 * widths[-1], size) for size in (NUMBERS, len(COLOURS), len(SHAPES)))

    def forward(self, images: Tensor) -> list[Tensor]:
        """``(B, 3, S, S)`` in 0..1 → three logits."""
        x = self.layers(images * 2 - 1)
        pooled = torch.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1)
        return [head(pooled) for head in self.heads]

    def names(self, images: Tensor) -> Tensor:
        """``(B, 3, S, S)`` in 0..1 → the likeliest kinds ``(B, 3)``."""
        return in_batches(lambda some: torch.stack([each.argmax(dim=1) for each in self(some)], dim=1), images)


def train_judge(judge: Judge, scenes: Scenes, updates: int, seed: int) -> None:
    """Train a judge on real images."""

    def loss(rows: Tensor) -> Tensor:
        found = judge(scenes.images[rows].float() / 255)
        each = [F.cross_entropy(logits, scenes.kinds[rows, number]) for number, logits in enumerate(found)]
        return torch.stack(each).sum()

    fit(judge, loss, updates, len(scenes.images), 3e-3, seed)


class Generator(nn.Module):
    """A transformer over the tokens of an image that reads the text by cross-attention.

    Args:
        vectors: ``(C, K, r)``, what the ids stand for.
        inputs: channels that a token is read from.
        tokens: N.
        text_tokens: T.
        text_width: D.
    """

    def __init__(self, vectors: Tensor, inputs: int, tokens: int, text_tokens: int, text_width: int, width: int):
        super().__init__()
        self.codebooks, self.tokens = len(vectors), tokens
        self.register_buffer("read", vectors)
        self.image_in = nn.Linear(inputs, width)
        self.text_in = nn.Sequential(nn.Linear(text_width, width), nn.LayerNorm(width))
        self.no_text = nn.Parameter(0.02 * torch.randn(width))
        self.place = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.text_place = nn.Parameter(0.02 * torch.randn(text_tokens, width))
        block = nn.TransformerDecoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerDecoder(block, 4, nn.LayerNorm(width))

    def vectors(self, ids: Tensor) -> Tensor:
        """Return what ids ``(B, n, C)`` stand for, ``(B, n, C, r)``."""
        return self.read[torch.arange(self.codebooks), ids]

    def states(self, text: Tensor, blank: Tensor, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the hidden states ``(B, n, width)`` of the first n tokens.

        Args:
            text: ``(B, T, D)`` vectors of the text ids, 0 where there is no token.
            blank: ``(B,)`` bool, True: draw without the text.
            image: ``(B, n, inputs)``.
            mask: ``(n, n)`` of the attention; None: each token sees all.
        """
        words = self.text_in(text).where(~blank[:, None, None], self.no_text) + self.text_place
        return self.blocks(self.image_in(image) + self.place[: image.shape[1]], words, tgt_mask=mask)


class MaskedGenerator(Generator):
    """A generator that fills in hidden ids, of all tokens at once; arguments as of `Generator`."""

    def __init__(self, vectors: Tensor, tokens: int, text_tokens: int, text_width: int, width: int = 128):
        codebooks, _, axes = vectors.shape
        super().__init__(vectors, codebooks * (axes + 1), tokens, text_tokens, text_width, width)
        # A logit is quadratic in a code's coordinates, so that the likeliest code can be anywhere in the codebook.
        self.register_buffer("written", torch.cat([vectors, vectors.square() - 1], dim=-1))
        self.image_out = nn.Linear(width, codebooks * 2 * axes)

    def forward(self, text: Tensor, blank: Tensor, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the coefficients ``(B, N, C, 2r)`` of the logits of all codebooks; see `logits`.

        Args:
            text: ``(B, T, D)`` vectors of the text ids, 0 where there is no token.
            blank: ``(B,)`` bool, True: draw without the text.
            ids: ``(B, N, C)`` int64.
            hidden: ``(B, N, C)`` bool, ids that are not read.
        """
        seen = torch.cat(
            [self.vectors(ids) * ~hidden[..., None], hidden[..., None]], dim=-1
        )  # with a mark of the hidden
        return self.image_out(self.states(text, blank, seen.flatten(2))).unflatten(-1, (self.codebooks, -1))

    def logits(self, coefficients: Tensor, asked: Tensor, codebook: int) -> Tensor:
        """Return the logits ``(A, K)`` of A places of a codebook, those where ``asked`` ``(B, N, C)`` is True."""
        return coefficients[:, :, codebook][asked[:, :, codebook]] @ self.written[codebook].T


def train_masked(model: MaskedGenerator, text: Tensor, ids: Tensor, updates: int, seed: int) -> None:
    """Train the masked generator: predict a random share of the ids from the others, now and then without the text."""
    draws = torch.Generator().manual_seed(seed)

    def loss(rows: Tensor) -> Tensor:
        seen = ids[rows]
        share = torch.cos(torch.rand(len(rows), 1, 1, generator=draws) * math.pi / 2)
        hidden = torch.rand(seen.shape, generator=draws) < share
        blank = torch.rand(len(rows), generator=draws) < 0.1
        coefficients, sums = model(text[rows], blank, seen, hidden), list[Tensor]()
        codebooks = torch.randperm(model.codebooks, generator=draws)[:CODEBOOKS]
        for codebook in codebooks.tolist():
            true = seen[:, :, codebook][hidden[:, :, codebook]]
            sums.append(F.cross_entropy(model.logits(coefficients, hidden, codebook), true, reduction="sum"))
        return torch.stack(sums).sum() / hidden[:, :, codebooks].sum().clamp(min=1)

    fit(model, loss, updates, len(ids), 2e-3, seed)


@torch.no_grad()
def draw_masked(model: MaskedGenerator, text: Tensor, rounds: int, guidance: float, seed: int) -> Tensor:
    """Draw ids ``(B, N, C)`` for text vectors ``(B, T, D)``, in an order that is random for each image.

    After each round the cosine of its share of all rounds is left to draw, so the first rounds draw few ids.

    Args:
        model: trained.
        text: vectors of the text ids.
        rounds: after the last one nothing is hidden.
        guidance: 1 draws from the model; more follows the text more closely.
        seed: keys all draws.
    """
    draws = torch.Generator().manual_seed(seed)
    shape = (len(text), model.tokens, model.codebooks)
    ids, hidden = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool)
    order = torch.rand(len(text), ids[0].numel(), generator=draws).argsort(dim=1).argsort(dim=1).view(shape)
    no, yes = (torch.full((len(text),), value) for value in (False, True))
    for number in range(1, rounds + 1):
        free = model(text, yes, ids, hidden)
        coefficients = free + guidance * (model(text, no, ids, hidden) - free)
        left = round(math.cos(math.pi / 2 * number / rounds) * ids[0].numel())
        now = hidden & (order >= left)
        for codebook in range(model.codebooks):
            chances = model.logits(coefficients, now, codebook).softmax(dim=-1)
            if len(chances):
                ids[:, :, codebook][now[:, :, codebook]] = chances.multinomial(1, generator=draws)[:, 0]
        hidden = hidden & ~now
    return ids


class TokenGenerator(Generator):
    """A generator that draws one token after another; other arguments as of `Generator`.

    Args:
        head: draws the ids of a token from its hidden state.
    """

    def __init__(self, vectors: Tensor, tokens: int, text_tokens: int, text_width: int, head: CodesHead):
        super().__init__(vectors, vectors[:, 0].numel(), tokens, text_tokens, text_width, head.width)
        self.head = head
        mask = torch.full((tokens, tokens), -torch.inf).triu(diagonal=1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor, blank: Tensor, ids: Tensor) -> Tensor:
        """Return the hidden states ``(B, n, H)`` that predict the first n tokens, each from those before it."""
        before = F.pad(self.vectors(ids[:, :-1]).flatten(2), (0, 0, 1, 0))
        return self.states(text, blank, before, self.mask[: ids.shape[1], : ids.shape[1]])


def build_head(kind: str, sizes: tuple[int, ...], levels: Sequence[int] | None, steps: int, width: int) -> CodesHead:
    """Make the head of kind depth or bits."""
    if kind == "depth":
        return CodesHeadConfig(kind="depth", codebook_sizes=sizes, width=width, depth_width=64, depth_layers=1).build()
    return MaskedBitsHeadConfig(
        codebook_sizes=sizes, width=width, levels=levels, steps=steps, inner_width=width * 3 // 2
    ).build()


def train_tokens(model: TokenGenerator, text: Tensor, ids: Tensor, updates: int, seed: int) -> None:
    """Train a generator of one token after another, now and then without the text."""
    draws = torch.Generator().manual_seed(seed)

    def loss(rows: Tensor) -> Tensor:
        blank = torch.rand(len(rows), generator=draws) < 0.1
        hidden = model(text[rows], blank, ids[rows])
        if isinstance(model.head, MaskedBitsHead):
            return model.head(hidden, ids[rows], int(torch.randint(2**62, (), generator=draws)))
        return model.head(hidden, ids[rows])

    fit(model, loss, updates, len(ids), 2e-3, seed)


@torch.no_grad()
def draw_tokens(model: TokenGenerator, text: Tensor, guidance: float, temperature: float, seed: int) -> Tensor:
    """Draw ids ``(B, N, C)`` for text vectors ``(B, T, D)``, token after token; arguments as of `draw_masked`."""
    no, yes = (torch.full((len(text),), value) for value in (False, True))

    def hidden_after(ids: Tensor) -> Tensor:
        begun = F.pad(ids, (0, 0, 0, 1))  # the next token is not read
        return torch.cat([model(text, blank, begun)[:, -1] for blank in ((no, yes) if guidance != 1 else (no,))])

    return model.head.generate(hidden_after, len(text), model.tokens, seed, temperature, guidance)


def shares(found: Tensor, asked: Tensor) -> list[float]:
    """Return the shares with the right number, colour, shape, the latter two, and all three."""
    right = found == asked
    columns = [*right.unbind(dim=1), right[:, 1:].all(dim=1), right.all(dim=1)]
    return [column.double().mean().item() for column in columns]


def write_sheet(path: Path, rows: Sequence[Tensor], columns: int = 16) -> None:
    """Write a PNG of the first images of each row."""
    lines = [torch.cat(list(images[:columns]), dim=2) for images in rows]
    pixels = (torch.cat(lines, dim=1).clamp(0, 1) * 255).round().to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, format="PNG")
    write_file(path, file.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train judge and generators, draw, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts with a pixel decoder")
    parser.add_argument("--scenes", type=int, default=16_000, help="training scenes")
    parser.add_argument("--judged", type=int, default=600, help="scenes to draw and judge")
    parser.add_argument("--generators", nargs="+", choices=GENERATORS, default=GENERATORS)
    parser.add_argument("--updates", type=int, default=2000, help="training steps of masked")
    parser.add_argument("--depth-updates", type=int, default=380, help="of depth; as long as masked")
    parser.add_argument("--bits-updates", type=int, default=1700, help="of bits; as long as masked")
    parser.add_argument("--judge-updates", type=int, default=500, help="training steps of the judge")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of the masked generator for an image")
    parser.add_argument("--steps", type=int, default=16, help="steps in which bits draws a token")
    parser.add_argument("--levels", type=int, nargs="+", help="of the FSQ whose digits bits predicts; default: bits")
    parser.add_argument("--guidance", type=float, default=2.0, help="of the generators by the text; 1: none")
    parser.add_argument("--temperature", type=float, default=0.5, help="of depth and bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path, help="PNG to write, with real, reconstructed and drawn scenes")
    options = parser.parse_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)

    image = vqclip.load_tokenizer(options.tokenizer, modality="image")
    text = vqclip.load_tokenizer(options.tokenizer, modality="text")
    size = image.tower.image_size
    held = scenes_of_one_kind(1, options.judged, size)
    with torch.no_grad():
        asked, vectors = text.decode(text.encode(held.captions)), coordinates(image)
    pictures = {
        "real images": held.images.float() / 255,
        "reconstructions": in_batches(lambda some: image.decode_pixels(image.encode(some)), held.images),
    }
    if options.sheet is not None:
        if options.sheet.exists():
            raise ConfigError(f"--sheet {options.sheet}: exists; expected the name of a new file")
        write_sheet(options.sheet, list(pictures.values()))  # so that a mistake shows now

    print(f"tokenizing {options.scenes} scenes", file=sys.stderr)
    ids, captions = training_ids(image, options.scenes)
    with torch.no_grad():
        told = text.decode(text.encode(captions))

    torch.manual_seed(options.seed)  # first weights
    judge = Judge()
    print(f"judge: {options.judge_updates} updates on real images")
    train_judge(judge, scenes_of_one_kind(2, options.scenes // 2, size), options.judge_updates, options.seed)
    shape = ids.shape[1], told.shape[1], told.shape[2]
    for name in options.generators:
        torch.manual_seed(options.seed)
        if name == "masked":
            model: Generator = MaskedGenerator(vectors, *shape)
        else:
            head = build_head(name, image.codebook_sizes, options.levels, options.steps, width=128)
            model = TokenGenerator(vectors, *shape, head)
        print(f"{name}: {sum(each.numel() for each in model.parameters()):,} weights")
        if isinstance(model, MaskedGenerator):
            train_masked(model, told, ids, options.updates, options.seed)
            drawn = draw_masked(model, asked, options.rounds, options.guidance, options.seed)
        else:
            updates = options.depth_updates if name == "depth" else options.bits_updates
            train_tokens(model, told, ids, updates, options.seed)
            drawn = draw_tokens(model, asked, options.guidance, options.temperature, options.seed)
        pictures[f"drawn, {name}"] = in_batches(image.decode_pixels, drawn)
    found = {name: judge.names(each) for name, each in pictures.items()}
    others = torch.randperm(len(asked), generator=torch.Generator().manual_seed(options.seed))
    found["chance"] = found[f"drawn, {options.generators[0]}"][others]
    print(
        f"\n| {len(asked)} scenes | number | colour | shape | colour and shape | all three |\n|---|---|---|---|---|---|"
    )
    for name, each in found.items():
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares(each, held.kinds))} |")
    if options.sheet is not None:
        write_sheet(options.sheet, list(pictures.values()))
        print(f"\nwrote {options.sheet}: rows as in the table; captions: {'; '.join(held.captions[:16])}")


if __name__ == "__main__":
    try:
        main()
    except (VqclipError, OSError) as error:
        sys.exit(f"error: {error}")
