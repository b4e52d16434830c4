"""Image ids in a causal language model of Hugging Face's transformers: train briefly, and generate from captions.

Prints losses and cosines, after about 1 minute on two CPU cores.

    pip install 'vqclip[examples]'
    python examples/hf_language_model.py runs/captions/tokenizer data/captions_noto_emoji

The language model is a placeholder for any existing one: a Llama of two layers with random weights, whose own 256 ids
are the bytes of text. `vqclip.lm_vocabulary.Vocabulary` puts the codes of images behind them, with marks of begin and
end; `resize` makes room in the model's table, and the new rows begin as projections of the codebooks' vectors, so
that similar codes start with similar embeddings. A sample is `caption, begin_image, N·C codes, end_image`. Generation
is limited to the codebook of each position, so every generated image can be decoded.

A few steps teach it which codes are frequent, not how to draw: `caption_and_draw.py` does that. `--seed` keys the first
weights, the new rows, the order of training and the sampling.

Shapes: B samples, N tokens, C codebooks, L places of a sequence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import vqclip
from vqclip.data import CaptionShardsConfig, EvalSet
from vqclip.errors import VqclipError
from vqclip.lm_vocabulary import Vocabulary, resize
from vqclip.tokenizer import ImageTokenizer

BYTES = 256
"""Number of the language model's own ids."""
BATCH = 2


def tokenize(tokenizer: ImageTokenizer, shards: Path, limit: int | None) -> tuple[Tensor, list[str]]:
    """Encode images to ids ``(B, N, C)``, with their captions."""
    source = CaptionShardsConfig(path=str(shards)).build()
    batches = list(EvalSet(source, tokenizer.transform, batch_size=256, limit=limit))
    ids = torch.cat([tokenizer.encode(batch.images) for batch in batches])
    return ids, [captions[0] for batch in batches for captions in batch.captions]


def language_model(vocabulary: Vocabulary, tokenizer: ImageTokenizer, seed: int) -> LlamaForCausalLM:
    """Build a small language model of bytes, with new rows for image ids."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    codebooks = [tokenizer.codebook(number) for number in range(len(tokenizer.codebook_sizes))]
    table = model.get_input_embeddings().weight
    resize(model, vocabulary.offset, vocabulary.rows(table, seed, {"image": codebooks}))
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = vocabulary.pad, vocabulary.special["end_image"]
    return model


def prompts(captions: Sequence[str], vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Convert captions to bytes, padded on the left: ids and mask, both ``(B, L)``."""
    rows = [torch.tensor(list(caption.encode())) for caption in captions]
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=vocabulary.pad) for row in rows])
    return ids, (ids != vocabulary.pad).long()


def train(
    model: LlamaForCausalLM, vocabulary: Vocabulary, ids: Tensor, captions: Sequence[str], steps: int, seed: int
) -> list[float]:
    """Train it to continue captions with images; return the loss of every step, in nats per id."""
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    model.train()
    losses = []
    for _ in tqdm(range(steps), desc="training", disable=None):
        some = torch.randint(len(ids), (BATCH,), generator=draws)
        asked, mask = prompts([captions[number] for number in some.tolist()], vocabulary)
        images = vocabulary.to_vocabulary(ids[some], "image")
        loss = model(
            input_ids=torch.cat([asked, images], dim=1),
            attention_mask=torch.cat([mask, torch.ones_like(images)], dim=1),
            labels=torch.cat([torch.full_like(asked, -100), images], dim=1),  # -100: not learned
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def generate(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tokenizer: ImageTokenizer, captions: Sequence[str], seed: int
) -> Tensor:
    """Sample image ids ``(B, N, C)`` for captions."""
    codes = vocabulary.codes("image")
    spans = [list(range(start, start + size)) for start, size in zip(codes.starts, codes.codebook_sizes, strict=True)]
    length = tokenizer.num_tokens * len(spans)
    begin = torch.full((len(captions), 1), vocabulary.special["begin_image"])
    asked, mask = prompts(captions, vocabulary)
    asked, mask = torch.cat([asked, begin], dim=1), torch.cat([mask, torch.ones_like(begin)], dim=1)

    def allowed_ids(_: int, sequence: Tensor) -> list[int]:
        place = len(sequence) - asked.shape[1]
        return spans[place % len(spans)] if place < length else [vocabulary.special["end_image"]]

    torch.manual_seed(seed)  # transformers samples from the global generator
    made = model.generate(
        asked, attention_mask=mask, max_new_tokens=length + 1, do_sample=True, prefix_allowed_tokens_fn=allowed_ids
    )
    return vocabulary.from_vocabulary(made[:, asked.shape[1] - 1 :], "image")


def main(arguments: Sequence[str] | None = None) -> None:
    """Tokenize, add rows, train, generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder or hub name of a tokenizer of images and texts")
    parser.add_argument("data", type=Path, help="folder of caption shards: train/*.tar, val/*.tar")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--limit", type=int, default=400, help="use only so many training samples")
    parser.add_argument("--images", type=int, default=4, help="images to generate, of captions of the val split")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)

    image = vqclip.load_tokenizer(options.tokenizer, modality="image")
    text = vqclip.load_tokenizer(options.tokenizer, modality="text")
    ids, captions = tokenize(image, options.data / "train", options.limit)
    _, asked = tokenize(image, options.data / "val", options.images)

    vocabulary = Vocabulary(image=image.codebook_sizes, offset=BYTES)
    model = language_model(vocabulary, image, options.seed)
    print(f"{BYTES} ids of its own, {vocabulary.size} new ones; {model.num_parameters():,} weights")

    losses = train(model, vocabulary, ids, captions, options.steps, options.seed)
    some = max(1, len(losses) // 5)
    first, last = sum(losses[:some]) / some, sum(losses[-some:]) / some
    print(f"{len(losses)} steps: {first:.2f} nats an id in the first {some}, {last:.2f} in the last {some}")

    drawn = generate(model, vocabulary, image, asked, options.seed)
    with torch.no_grad():
        cosines = (image.embed(drawn) * text.embed(text.encode(asked))).sum(dim=1)
    for caption, cosine in zip(asked, cosines.tolist(), strict=True):
        print(f"  {caption!r}: {tuple(drawn.shape[1:])} ids, cosine to the caption {cosine:+.2f}")


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
