"""Text towers: open_clip's text transformer over its byte-pair vocabulary; captions to per-token features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from einops import repeat
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import MAX_LAYERS, MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.attention import heads_divide_width
from vqclip.nn.inputs import require_captions

MAX_CONTEXT = 4096
"""Largest context length."""
_CACHED_WORDS = 100_000
_LONG_WORD = 64
"""Longer words, in characters, are not cached."""


class TextTower(nn.Module):
    """A text transformer that gives a feature for every token.

    Args:
        transformer: an ``open_clip.transformer.TextTransformer`` over open_clip's byte pairs.

    Attributes:
        context_length: N, positions per caption; captions are cut or padded to it.
        width: D, features per token.
        vocab_size: size of the byte-pair vocabulary.
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        # Features are taken before the projection, which would get no gradient.
        transformer.text_projection = None  # type: ignore[assignment]
        self.transformer = transformer
        self.context_length = int(transformer.context_length)  # type: ignore[arg-type]
        self.width = int(transformer.width)  # type: ignore[arg-type]
        self.vocab_size = int(transformer.vocab_size)  # type: ignore[arg-type]
        self.end_of_text = int(_bpe().eot_token_id)

    @property
    def num_tokens(self) -> int:
        """N, token positions per caption, padding included."""
        return self.context_length

    @property
    def sees_padding(self) -> bool:
        """True if a token's features depend on the padding after it."""
        text: Any = self.transformer
        return text.attn_mask is None and not text.use_pad_mask  # as in MobileCLIP

    def mask(self, tokens: Tensor) -> Tensor:
        """Return ``(B, N)`` bool, True up to and including the first end mark; a row without one has no real token.

        The padding's number 0 is ambiguous: it is also the number of "!" inside a word.
        """
        is_end = tokens == self.end_of_text
        end = is_end.int().argmax(dim=1, keepdim=True)  # the first of equals
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return (positions <= end) & is_end.any(dim=1, keepdim=True)

    def require_captions(self, tokens: Tensor) -> None:
        """Check that each row is a caption; `forward` does not check values, to save time.

        Raises:
            ShapeError: wrong shape or dtype, a number outside the vocabulary, or a row without end mark.
        """
        self._require_shape(tokens)
        for number in tokens[(tokens < 0) | (tokens >= self.vocab_size)].tolist():
            raise ShapeError(f"tokens: got the number {number}, expected 0 to {self.vocab_size - 1}")
        for row in (tokens != self.end_of_text).all(dim=1).nonzero().flatten().tolist():
            raise ShapeError(
                f"tokens[{row}]: got a row without the end mark {self.end_of_text}, expected one after the last token; "
                "tokenizer.preprocess makes such rows from captions"
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(B, N)`` int64 token numbers to features ``(B, N, D)``; those of padding are undefined.

        The last columns may be left out if they are padding in every row, unless the tower `sees_padding`.

        Raises:
            ShapeError: wrong shape or dtype.
        """
        self._require_shape(tokens)
        if tokens.shape[0] == 0:  # torch's attention cannot reshape an empty mask; weights need their (zero) gradient
            return self(tokens.new_zeros(1, tokens.shape[1]))[:0]
        text: Any = self.transformer
        x = text.token_embedding(tokens) + text.positional_embedding[: tokens.shape[1]]
        return text.ln_final(text.transformer(x, attn_mask=self._attention_mask(tokens, x.dtype)))

    def _require_shape(self, tokens: Tensor) -> None:
        full = self.context_length
        least = full if self.sees_padding else 1
        if tokens.ndim != 2 or not least <= tokens.shape[1] <= full or tokens.dtype != torch.int64:
            columns = str(full) if least == full else f"1 to {full}"
            raise ShapeError(
                f"tokens: got shape {tuple(tokens.shape)} and dtype {tokens.dtype}, expected (B, {columns}) int64; "
                "tokenizer.preprocess makes such a tensor from captions"
            )

    def _attention_mask(self, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the mask to add to the scores: open_clip's causal mask, or one of the padding (see `mask`)."""
        text: Any = self.transformer
        length = tokens.shape[1]
        if text.attn_mask is not None:
            return text.attn_mask[:length, :length]
        if self.sees_padding:
            return None
        real = self.mask(tokens)
        visible = real | ~real.any(dim=1, keepdim=True)  # attention over nothing would be NaN
        hidden = torch.zeros(visible.shape, dtype=dtype, device=tokens.device).masked_fill(~visible, float("-inf"))
        return repeat(hidden, "b keys -> (b heads) queries keys", heads=text.heads, queries=length)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the transformer's activations in the backward pass, to save memory."""
        self.transformer.set_grad_checkpointing(enable)  # type: ignore[operator]


class TransformerTowerConfig(Config):
    """A text transformer of your own size (open_clip's module and vocabulary)."""

    random_weights: ClassVar[dict[str, Any]] = {}
    """Settings to change to build the same network without pretrained weights."""

    kind: Literal["transformer"] = "transformer"
    context_length: int = Field(32, ge=4, le=MAX_CONTEXT)
    """Token positions per caption, start and end marks included; longer captions are cut."""
    width: int = Field(512, ge=8, le=MAX_WIDTH)
    """Features per token."""
    heads: int = Field(8, ge=1)
    """Attention heads; must divide `width`."""
    layers: int = Field(12, ge=1, le=MAX_LAYERS)
    """Transformer blocks."""
    causal: bool = True
    """True: a token attends to earlier tokens only, as in CLIP. False: to the whole caption without padding."""
    token_std: float = Field(0.02, gt=0, le=10)
    """Standard deviation of the initial token embeddings. CLIP's 0.02 suits long runs. In short runs the first steps
    move such small embeddings by more than their differences, so that words become similar; 1 avoids this."""

    _heads_divide_width = model_validator(mode="after")(heads_divide_width)

    def build(self) -> TextTower:
        """Make the tower with random weights (torch's global generator)."""
        from open_clip.transformer import TextTransformer

        transformer = TextTransformer(
            context_length=self.context_length,
            vocab_size=_bpe().vocab_size,
            width=self.width,
            heads=self.heads,
            layers=self.layers,
            output_dim=None,
            pool_type="none",
            no_causal_mask=not self.causal,
            use_pad_mask=not self.causal,
        )
        nn.init.normal_(transformer.token_embedding.weight, std=self.token_std)
        return TextTower(transformer)

    def vocabulary(self) -> BPE:
        """Return the vocabulary that maps captions to this tower's token numbers."""
        return BPE(self.context_length)


class OpenCLIPTextTowerConfig(Config):
    """The text half of an open_clip model."""

    random_weights: ClassVar[dict[str, Any]] = {"pretrained": None}
    """Settings to change to build the same network without pretrained weights."""

    kind: Literal["open_clip"] = "open_clip"
    model: str
    """Name of the open_clip model, such as `ViT-B-16`."""
    pretrained: str | None = None
    """Tag of pretrained weights (`open_clip.list_pretrained()`) or the path of a local file; null: random weights."""

    def build(self) -> TextTower:
        """Make the tower.

        Raises:
            ConfigError: unknown model or tag, or a text half that is not open_clip's own transformer.
        """
        from open_clip.transformer import TextTransformer

        from vqclip.towers.open_clip import create_open_clip

        text = create_open_clip(self.model, self.pretrained).text
        if not isinstance(text, TextTransformer) or text.cls_emb is not None or text.vocab_size != _bpe().vocab_size:
            raise ConfigError(
                f"tower.model: the text half of {self.model!r} is a {type(text).__name__} with another vocabulary or a "
                "class token; expected open_clip's own text transformer over its byte pairs (such as ViT-B-16)"
            )
        return TextTower(text)

    def vocabulary(self) -> BPE:
        """Return the vocabulary that maps captions to this tower's token numbers."""
        import open_clip

        config = open_clip.get_model_config(self.model) or {}
        return BPE(int(config.get("text_cfg", {}).get("context_length", 77)))


class BPE:
    """open_clip's byte-pair vocabulary at a fixed context length.

    Contains only the length, so that it is cheap to send to data-loader workers; each process loads the tables once.

    Args:
        context_length: N, token positions per caption.
    """

    def __init__(self, context_length: int):
        self.context_length = context_length

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Map B captions to ``(B, N)`` int64, start and end marks included, padded with 0.

        Raises:
            ShapeError: not a list or tuple of str.
        """
        return self.with_lengths(captions)[0]

    def with_lengths(self, captions: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Tokenize captions as `__call__` does, and return the length of each before it was cut.

        Lengths are in tokens, start and end marks included, and at most `MAX_CONTEXT` + 1.
        """
        bpe = _bpe()
        rows = [[bpe.sot_token_id, *bpe.encode(text), bpe.eot_token_id] for text in require_captions(captions)]
        tokens = torch.zeros(len(rows), self.context_length, dtype=torch.int64)
        for row, numbers in zip(tokens, rows, strict=True):
            if len(numbers) > self.context_length:
                numbers = [*numbers[: self.context_length - 1], bpe.eot_token_id]
            row[: len(numbers)] = torch.tensor(numbers)
        return tokens, [min(len(numbers), MAX_CONTEXT + 1) for numbers in rows]


class CaptionLengths(Counter[int]):
    """Counts of captions by their length in tokens, see `BPE.with_lengths`."""

    def count_cut(self, context_length: int) -> int:
        """Return the number of captions that are longer than ``context_length``."""
        return sum(count for length, count in self.items() if length > context_length)

    def length_for(self, percent: int) -> int:
        """Return the smallest context length that holds ``percent`` % of captions without a cut."""
        held = 0
        for length in sorted(self):
            held += self[length]
            if 100 * held >= percent * self.total():
                return length
        return 0

    def describe_cuts(self, context_length: int, key: str = "context_length") -> str | None:
        """Describe how many captions are cut and which lengths would hold more of them; None if none is cut."""
        cut, total = self.count_cut(context_length), self.total()
        if not cut:
            return None
        wanted = {self.length_for(percent): f"{percent} %" for percent in (95, 99, 100)}
        better = [f"{length} would hold {share}" for length, share in wanted.items() if length > context_length]
        better = [each.replace(f"{MAX_CONTEXT + 1}", f"more than {MAX_CONTEXT}") for each in better[:2]]
        return (
            f"{100 * cut / total:.1f} % of captions ({cut:,} of {total:,}) are longer than {key} {context_length} "
            f"and were cut; {' and '.join(better)} of them"
        )


class _Bounded(dict[str, str]):
    """A cache that is cleared when it is full: open_clip's own cache grows without limit."""

    def __setitem__(self, word: str, pairs: str) -> None:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        if len(word) <= _LONG_WORD:
            super().__setitem__(word, pairs)


@lru_cache(maxsize=1)
def _bpe() -> Any:
    """Return open_clip's tokenizer, changed so that ``<end_of_text>`` in a caption is ordinary text."""
    from open_clip import tokenizer as theirs

    tokenizer = theirs.SimpleTokenizer()
    # Its pattern matches marks in captions first. Without that alternative their letters and brackets are split like
    # other text, and no caption, also not `&lt;end_of_text&gt;`, gives the number of a mark.
    marks = "|".join(tokenizer.decoder[number] for number in tokenizer.all_special_ids) + "|"
    pattern: str = tokenizer.pat.pattern
    if not pattern.startswith(marks):
        raise RuntimeError(f"open_clip's tokenizer changed: expected a pattern that starts with {marks}, got {pattern}")
    regex = theirs.re  # the package of that name: Python's own does not know \p{L}
    tokenizer.pat = regex.compile(pattern.removeprefix(marks), regex.IGNORECASE)
    tokenizer.cache = _Bounded()
    return tokenizer
