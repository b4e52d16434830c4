"""Classifiers on the ids of images alone, beside the tokenizer's zero-shot classification.

Prints a table, after about 2 minutes on two CPU cores.

    python examples/classify.py runs/eurosat/tokenizer data/cls_eurosat

- *zero-shot, codes only*: the class with the nearest prompts, `embed(ids)` on both sides. Nothing is trained.
- *linear probe*: logistic regression on the mean and deviation of an image's vectors, `decode(ids)`, and on its
  embedding, `embed(ids)`.
- *transformer*: learned embeddings of the ids and a few blocks of attention. The embeddings begin at random, or as the
  vectors of the tokenizer's codebooks.

All are trained on the ids of the train split, of every image and its quarter turns (satellite images have no fixed
orientation); the probe's penalty is chosen by cross-validation inside it. The test images are not turned. `--seed`
keys the folds, the transformers and the bootstrap.

Shapes: B images, N tokens, C codebooks, D and E widths of the tokenizer's vectors and embedding, L classes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import vqclip
from vqclip.data import ClassShardsConfig, EvalSet, Source
from vqclip.errors import VqclipError
from vqclip.lm_vocabulary import projected_rows
from vqclip.tokenizer import ImageTokenizer, TextTokenizer

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
FOLDS = 5
TURNS = 4
"""Quarter turns of each training image."""


class Tokens(NamedTuple):
    """Tokenized split of the data."""

    ids: Tensor
    """``(B, N, C)`` int64."""
    labels: Tensor
    """``(B,)`` int64."""


def tokenize(tokenizer: ImageTokenizer, source: Source, limit: int | None, turns: int = 1) -> Tokens:
    """Encode images to ids; with ``turns`` also each image's quarter turns, after all upright images."""
    batches = list(EvalSet(source, tokenizer.transform, batch_size=256, limit=limit))
    todo = tqdm([(turn, batch) for turn in range(turns) for batch in batches], desc="encode", disable=None)
    ids = [tokenizer.encode(batch.images.rot90(turn, (2, 3))) for turn, batch in todo]
    return Tokens(torch.cat(ids), torch.cat([batch.labels for batch in batches]).repeat(turns))


@torch.no_grad()
def zero_shot(image: ImageTokenizer, text: TextTokenizer, source: Source, ids: Tensor) -> Tensor:
    """Return the classes ``(B,)`` of the nearest prompts, with images and prompts from their codes alone."""
    prompts = [template.replace("{c}", name) for name in source.classnames for template in source.templates]
    classes = text.embed(text.encode(prompts)).unflatten(0, (-1, len(source.templates))).mean(dim=1)
    return (image.embed(ids) @ F.normalize(classes, dim=-1).T).argmax(dim=1)


@torch.no_grad()
def features(tokenizer: ImageTokenizer, ids: Tensor) -> Tensor:
    """Return ``(B, 2 D + E)``: mean and deviation of each image's vectors, and its embedding."""
    rows = []
    for part in ids.split(256):
        vectors = tokenizer.decode(part)
        rows.append(torch.cat([vectors.mean(dim=1), vectors.std(dim=1), tokenizer.embed(part)], dim=1))
    return torch.cat(rows)


def fit_linear(inputs: Tensor, labels: Tensor, classes: int, penalty: float) -> Callable[[Tensor], Tensor]:
    """Fit logistic regression with an L2 penalty on standardised features; return its function to classes."""
    mean, deviation = inputs.mean(dim=0), inputs.std(dim=0).clamp(min=1e-6)
    inputs = (inputs - mean) / deviation
    weight = torch.zeros(inputs.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=40, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(inputs @ weight + bias, labels) + penalty * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda others: (((others - mean) / deviation) @ weight.detach() + bias.detach()).argmax(dim=1)


def choose_penalty(inputs: Tensor, labels: Tensor, classes: int, seed: int) -> float:
    """Return the penalty with the best cross-validation accuracy, the strongest of several equal ones.

    All turns of an image are in one fold.
    """
    images = len(labels) // TURNS
    fold = (torch.randperm(images, generator=torch.Generator().manual_seed(seed)) % FOLDS).repeat(TURNS)

    def right(penalty: float) -> int:
        answers = torch.empty_like(labels)
        for held in range(FOLDS):
            predict = fit_linear(inputs[fold != held], labels[fold != held], classes, penalty)
            answers[fold == held] = predict(inputs[fold == held])
        return int((answers == labels).sum())

    return max(tqdm(PENALTIES, desc="linear probe", disable=None), key=lambda penalty: (right(penalty), penalty))


class TransformerClassifier(nn.Module):
    """Transformer from ids to classes. A token is the concatenation of its C ids' embeddings.

    Args:
        tokenizer: whose ids they are.
        classes: L.
        from_codebooks: whether the embeddings begin as projections of the codebooks' vectors, or at random.
        width: of an id's embedding; a token is C times as wide.
        depth: blocks of attention.
    """

    def __init__(self, tokenizer: ImageTokenizer, classes: int, from_codebooks: bool, width: int = 8, depth: int = 2):
        super().__init__()
        self.numbered = tokenizer.to_vocabulary  # one range of numbers for each codebook, so that one table holds all
        wide = width * len(tokenizer.codebook_sizes)
        self.table = nn.Embedding(sum(tokenizer.codebook_sizes), width)
        nn.init.normal_(self.table.weight, std=0.5)
        if from_codebooks:
            first = self.table.weight.detach().clone()
            rows = [projected_rows(first, tokenizer.codebook(c), seed=c) for c in range(len(tokenizer.codebook_sizes))]
            self.table.weight.data.copy_(torch.cat(rows))
        self.position = nn.Parameter(0.02 * torch.randn(tokenizer.num_tokens, wide))
        block = nn.TransformerEncoderLayer(
            wide, nhead=4, dim_feedforward=2 * wide, dropout=0.3, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(wide), nn.Dropout(0.3), nn.Linear(wide, classes))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``(B, L)`` of ids ``(B, N, C)``."""
        tokens = self.table(self.numbered(ids)).view(*ids.shape[:2], -1)
        return self.out(self.blocks(tokens + self.position).mean(dim=1))


def fit_transformer(
    tokenizer: ImageTokenizer, train: Tokens, classes: int, steps: int, seed: int, from_codebooks: bool
) -> nn.Module:
    """Train it with AdamW, warmup and decay."""
    torch.manual_seed(seed)  # first weights, order of the images, dropout
    model = TransformerClassifier(tokenizer, classes, from_codebooks)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=max(20, steps), pct_start=0.1)
    for _ in tqdm(range(steps), desc="transformer", disable=None):
        some = torch.randint(len(train.labels), (128,))
        loss = F.cross_entropy(model(train.ids[some]), train.labels[some], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def answers(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the classes ``(B,)``."""
    return torch.cat([model(part).argmax(dim=1) for part in ids.split(256)])


def interval(differences: Tensor, seed: int, draws: int = 10_000) -> tuple[float, float]:
    """Return a 95 % interval of the mean of ``(B,)`` differences, by a bootstrap over images."""
    generator = torch.Generator().manual_seed(seed)
    means = [
        differences[torch.randint(len(differences), (draws // 10, len(differences)), generator=generator)].mean(dim=1)
        for _ in range(10)
    ]
    low, high = torch.cat(means).quantile(torch.tensor([0.025, 0.975]).to(differences)).tolist()
    return low, high


def main(arguments: Sequence[str] | None = None) -> None:
    """Tokenize, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts")
    parser.add_argument("data", help="labelled shards: classnames.txt, train/*.tar, test/*.tar")
    parser.add_argument("--steps", type=int, default=400, help="training steps of a transformer")
    parser.add_argument("--limit", type=int, help="number of images to use from each split")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)

    image = vqclip.load_tokenizer(options.tokenizer, modality="image")
    text = vqclip.load_tokenizer(options.tokenizer, modality="text")
    sources = {split: ClassShardsConfig(path=options.data, split=split).build() for split in ("train", "test")}
    train = tokenize(image, sources["train"], options.limit, TURNS)
    test = tokenize(image, sources["test"], options.limit)
    classes = len(sources["test"].classnames)

    inputs = features(image, train.ids)
    penalty = choose_penalty(inputs, train.labels, classes, options.seed)
    probe = fit_linear(inputs, train.labels, classes, penalty)
    from_scratch = fit_transformer(image, train, classes, options.steps, options.seed, from_codebooks=False)
    from_codebooks = fit_transformer(image, train, classes, options.steps, options.seed, from_codebooks=True)

    right = {
        "zero-shot, codes only": zero_shot(image, text, sources["test"], test.ids),
        f"linear probe, penalty {penalty:g}": probe(features(image, test.ids)),
        "transformer, from scratch": answers(from_scratch, test.ids),
        "transformer, from codebooks": answers(from_codebooks, test.ids),
    }
    right = {name: (each == test.labels).double() for name, each in right.items()}
    reference = right["zero-shot, codes only"]
    print(
        f"{len(train.labels) // TURNS} training images, {len(test.labels)} test images, "
        f"{image.bits_per_sample:g} bits each"
    )
    for name, each in right.items():
        low, high = interval(each - reference, options.seed)
        gain = "" if each is reference else f"   {_points((each - reference).mean())} [{low:+.1%}, {high:+.1%}]"
        print(f"{name:32} {each.mean():6.1%}{gain}")


def _points(difference: Tensor) -> str:
    return f"{float(difference):+.1%}"


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
