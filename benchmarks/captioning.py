"""Captions from ids: the same small language model captions drawn scenes from the ids of several tokenizers.

Prints a table, after about 27 minutes on two CPU cores.

    python benchmarks/captioning.py
    python benchmarks/captioning.py --families fsq vq --steps 100 --updates 100 --seeds 0

Tokenizers: `configs/base.yaml` with fewer steps and one quantizer of each family of `families.py`, 128 bits a token,
trained once (seed 0) on scenes with free captions. Then a causal transformer reads the 16 tokens of an image and writes
five words: number, colour and shape of the objects, and for a single one where it is (a third of the width, and one of
the height). It trains on 4,000 scenes, and writes the likeliest words for 600 new ones of the same kinds.

*Ids* are read by `CodesEmbedding`: a learned row for each code, rows of a token added up. *Ids as vectors* are what the
tokenizer decodes them to, read by a linear layer, and *continuous* the vectors before rounding; `identity` is a
tokenizer that was trained without codes. *From images* encodes the batch's images in every update. `--seeds` key the
decoder's weights, order of training and dropout.

Shapes: B samples, N tokens, C codebooks, D width of the quantizer, W words of a caption, H width of the decoder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from families import rows
from torch import Tensor, nn

import vqclip
from vqclip.lm_vocabulary import CodesEmbedding
from vqclip.scenes.drawing import draw_scene
from vqclip.scenes.scene import Draws, sample_scene
from vqclip.scenes.splits import TRAINED
from vqclip.tokenizer import ImageTokenizer
from vqclip.train import run

FAMILIES = ("identity", "fsq", "lfq", "vq", "residual-vq")
ATTRIBUTES = ("number", "colour", "shape", "across", "down")
BATCH = 64


class Scenes(NamedTuple):
    """Scenes of one to three equal objects, half of them of one."""

    images: Tensor
    """``(B, 3, S, S)`` uint8."""
    captions: list[tuple[str, ...]]
    """W words each."""


def draw(seed: int, count: int, size: int) -> Scenes:
    """Draw scenes, keyed by the seed and their number."""
    images, captions = [], []
    for index in range(count):
        draws = Draws(seed, index)
        number, (colour, shape) = (1, 2, 1, 3)[index % 4], TRAINED[index // 4 % len(TRAINED)]
        scene = sample_scene(draws, (colour, shape), [(colour, shape)], {number: 1.0})
        places = [_third(at) if number == 1 else "-" for at in (scene.objects[0].x, scene.objects[0].y)]
        images.append(torch.from_numpy(draw_scene(scene, size, draws)).permute(2, 0, 1))
        captions.append((str(number), colour, shape, *places))
    return Scenes(torch.stack(images), captions)


def _third(at: float) -> str:
    return "low" if at < 0.4 else "high" if at > 0.6 else "middle"


class Decoder(nn.Module):
    """A causal transformer over the tokens of an image and then the words of its caption.

    Args:
        read: embeds what is known of the image, ``(B, N, ...)``, as ``(B, N, H)``.
        tokens: N.
        words: size of the vocabulary; the last one begins a caption.
    """

    def __init__(self, read: nn.Module, tokens: int, words: int, width: int = 96):
        super().__init__()
        self.read, self.begin = read, words - 1
        self.word = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(tokens + len(ATTRIBUTES), width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        """Return the logits ``(B, w + 1, words)`` of the next word after each of the first w ``(B, w)``."""
        began = F.pad(words, (1, 0), value=self.begin)
        read = torch.cat([self.read(image), self.word(began)], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(read.shape[1])
        hidden = self.blocks(read + self.place[: read.shape[1]], mask=mask, is_causal=True)
        return self.out(hidden[:, -began.shape[1] :])

    @torch.no_grad()
    def write(self, image: Tensor) -> Tensor:
        """Return the likeliest words ``(B, W)``, one after another."""
        words = torch.empty(len(image), 0, dtype=torch.int64)
        for _ in ATTRIBUTES:
            words = torch.cat([words, self(image, words)[:, -1:].argmax(dim=-1)], dim=1)
        return words


@torch.no_grad()
def vectors(tokenizer: ImageTokenizer, images: Tensor) -> Tensor:
    """Return ``(B, N, D)``: what the quantizer would round."""
    features, mask = tokenizer.features(images)
    return tokenizer.quantizer.continuous(features, mask)


def train(model: Decoder, image: Callable[[Tensor], Tensor], words: Tensor, updates: int, seed: int) -> float:
    """Train with AdamW, warmup and decay; return the seconds of an update.

    Args:
        model: the decoder.
        image: returns what is known of the images of some rows ``(B,)``.
        words: ``(B, W)`` of all rows.
        updates: steps.
        seed: keys the order.
    """
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(20, updates), pct_start=0.1)
    model.train()
    began = time.perf_counter()
    for _ in range(updates):
        some = torch.randint(len(words), (BATCH,), generator=draws)
        loss = F.cross_entropy(model(image(some), words[some, :-1]).flatten(0, 1), words[some].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return (time.perf_counter() - began) / max(1, updates)


class Outcome(NamedTuple):
    """Figures of one decoder on the new scenes."""

    nats: float
    """Loss of a caption."""
    right: list[float]
    """Share of captions that are right in each attribute, and in all."""
    seconds: float
    """Time of an update."""


def measure(model: Decoder, image: Tensor, words: Tensor, seconds: float) -> Outcome:
    """Judge a trained decoder."""
    with torch.no_grad():
        logits = model(image, words[:, :-1])
    nats = F.cross_entropy(logits.flatten(0, 1), words.flatten()) * len(ATTRIBUTES)
    same = model.write(image) == words
    right = [*same.double().mean(dim=0).tolist(), float(same.all(dim=1).double().mean())]
    return Outcome(float(nats), right, seconds)


def main() -> None:
    """Train tokenizers and decoders, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--steps", type=int, default=300, help="of a tokenizer")
    parser.add_argument("--updates", type=int, default=500, help="of a decoder")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/captioning"))
    options = parser.parse_args()
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    torch.set_num_threads(1)
    config = Path(__file__).parents[1] / "configs" / "base.yaml"

    known, new = draw(1, 4000, 64), draw(2, 600, 64)
    names = sorted({word for caption in known.captions + new.captions for word in caption})
    number = {name: index for index, name in enumerate(names)}
    words, asked = (torch.tensor([[number[word] for word in each] for each in s.captions]) for s in (known, new))
    titles = [*ATTRIBUTES, "all five"]
    print("| read | nats a caption | " + " | ".join(titles) + " | ms an update, stored | from images |")
    print("|---|---|" + "---|" * len(titles) + "---|---|")
    for family, quantizer in rows(options.families, [128]).items():
        name = f"{family}-{options.steps}"
        folder = options.folder / name / "tokenizer"
        if not folder.exists():
            settings = [f"run.folder={options.folder}", f"run.name={name}", f"train.steps={options.steps}"]
            settings += [
                f"model.image.quantizer={quantizer}",
                f"model.text.quantizer={quantizer}",
                "report=null",
                "evaluation=[]",
            ]
            run(config, overrides=settings)
        tokenizer = vqclip.load_tokenizer(folder, modality="image")
        kinds: dict[str, Callable[[Tensor], Tensor]] = {}
        if tokenizer.codebook_sizes:
            kinds[f"{family}, ids"] = tokenizer.encode
            kinds[f"{family}, ids as vectors"] = lambda images, tokenizer=tokenizer: tokenizer.quantizer.decode(
                tokenizer.encode(images)
            )
        kinds[f"{family}, continuous"] = lambda images, tokenizer=tokenizer: vectors(tokenizer, images)
        for title, encode in kinds.items():
            stored, held = (torch.cat([encode(p) for p in s.images.split(200)]) for s in (known, new))
            found, slow = list[Outcome](), 0.0
            for seed in options.seeds:
                torch.manual_seed(seed)  # first weights, dropout
                is_code = not stored.is_floating_point()
                read = CodesEmbedding(tokenizer.codebook_sizes, 96) if is_code else nn.Linear(stored.shape[-1], 96)
                model = Decoder(read, stored.shape[1], len(names) + 1)
                seconds = train(model, lambda some, stored=stored: stored[some], words, options.updates, seed)
                found.append(measure(model, held, asked, seconds))
                if not slow:
                    slow = train(model, lambda some, encode=encode: encode(known.images[some]), words, 20, seed)
            nats = [each.nats for each in found]
            cells = [f"{statistics.mean(nats):.2f} ({min(nats):.2f}–{max(nats):.2f})"]
            for column in zip(*(each.right for each in found), strict=True):
                shares = [100 * share for share in column]
                cells.append(f"{statistics.mean(shares):.1f} ({min(shares):.1f}–{max(shares):.1f})")
            cells += [f"{1e3 * statistics.median(each.seconds for each in found):.0f}", f"{1e3 * slow:.0f}"]
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
