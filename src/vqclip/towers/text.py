"""Text towers: token numbers to features of each token; open_clip's text transformer over its byte pairs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import repeat
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config.bounds import MAX_LAYERS, MAX_WIDTH
from vqclip.errors import ShapeError
from vqclip.nn.layers import Block, Norm, RMSNorm, heads_divide_width, rotary_angles
from vqclip.towers.base import Tower, TowerConfig, set_training
from vqclip.towers.vocabulary import BPE, MAX_CONTEXT, Bytes, Vocabulary


class TextTower(Tower):
    """A text network that gives a feature for every token; a subclass runs the network of a library in `features`.

    Args:
        transformer: the network.
        width: D, features per token.
        vocabulary: maps captions to its token numbers.

    Attributes:
        context_length, num_tokens: N, positions per caption; captions are cut or padded to it.
        sees_padding: True if a token's features depend on the padding after it.
        unused: names of weights that do not affect the features, such as a pooler's.
    """

    transformer: Any
    sees_padding = False

    def __init__(self, transformer: nn.Module, width: int, vocabulary: Vocabulary):
        super().__init__()
        self.transformer, self.width, self.vocabulary = transformer, width, vocabulary
        self.context_length = self.num_tokens = vocabulary.context_length
        self.unused: tuple[str, ...] = ()

    @abstractmethod
    def features(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Map tokens ``(B, N)``, of which ``real`` are no padding, to ``(B, N, D)``; B is at least 1."""

    def mask(self, tokens: Tensor) -> Tensor:
        """Return ``(B, N)`` bool, True at real tokens, marks included; see `Vocabulary.mask`."""
        return self.vocabulary.mask(tokens)

    def require_captions(self, tokens: Tensor) -> None:
        """Check that each row is a caption; `forward` does not check values, to save time.

        Raises:
            ShapeError: wrong shape or dtype, a number outside the vocabulary, or a row that the vocabulary never makes.
        """
        self._require_shape(tokens)
        self.vocabulary.require_rows(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(B, N)`` int64 token numbers to features ``(B, N, D)``; those of padding are undefined.

        The last columns may be left out if they are padding in every row, unless the tower `sees_padding`.

        Raises:
            ShapeError: wrong shape or dtype.
        """
        self._require_shape(tokens)
        if tokens.shape[0] == 0:  # torch's attention cannot reshape an empty mask; weights need their (zero) gradient
            return self(tokens.new_zeros(1, tokens.shape[1]))[:0]
        return self.features(tokens, self.mask(tokens))

    def _require_shape(self, tokens: Tensor) -> None:
        full = self.context_length
        least = full if self.sees_padding else 1
        if tokens.ndim != 2 or not least <= tokens.shape[1] <= full or tokens.dtype != torch.int64:
            columns = str(full) if least == full else f"1 to {full}"
            raise ShapeError(
                f"tokens: got shape {tuple(tokens.shape)} and dtype {tokens.dtype}, expected (B, {columns}) int64; "
                "tokenizer.preprocess makes such a tensor from captions"
            )

    def pad_inputs(self, inputs: Tensor) -> Tensor:
        """Add padding to the rows of ``(B, T)`` tokens up to the context length."""
        return F.pad(inputs, (0, max(0, self.context_length - inputs.shape[1])), value=self.vocabulary.padding)

    def example(self) -> Tensor:
        """Return a row of zeros ``(1, N)`` int64."""
        return torch.zeros(1, self.context_length, dtype=torch.int64, device=next(self.parameters()).device)


class OpenCLIPTextTower(TextTower):
    """A tower of ``open_clip.transformer.TextTransformer``, over open_clip's byte pairs by default."""

    def __init__(self, transformer: Any, vocabulary: Vocabulary | None = None):
        # Features are taken before the projection, which would get no gradient.
        transformer.text_projection = None
        super().__init__(transformer, int(transformer.width), vocabulary or BPE(int(transformer.context_length)))
        self.sees_padding = transformer.attn_mask is None and not transformer.use_pad_mask  # as in MobileCLIP

    def features(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Run the transformer without its pooling."""
        network = self.transformer
        x = network.token_embedding(tokens) + network.positional_embedding[: tokens.shape[1]]
        return network.ln_final(network.transformer(x, attn_mask=self.attention_mask(real, x.dtype)))

    def attention_mask(self, real: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the mask to add to the scores: open_clip's causal mask, or one of the padding."""
        length = real.shape[1]
        if self.transformer.attn_mask is not None:
            return self.transformer.attn_mask[:length, :length]
        if self.sees_padding:
            return None
        visible = attendable(real)
        hidden = torch.zeros(visible.shape, dtype=dtype, device=real.device).masked_fill(~visible, float("-inf"))
        return repeat(hidden, "b keys -> (b heads) queries keys", heads=self.transformer.heads, queries=length)


class TextBlocks(nn.Module):
    """A text transformer of `vqclip.nn.layers.Block`, with the options of `TransformerTowerConfig`.

    Its weights start with the deviations of open_clip's.

    Args:
        config: the tower's.
        size: number of tokens of the vocabulary.
    """

    def __init__(self, config: TransformerTowerConfig, size: int):
        super().__init__()
        width, head_width = config.width, config.width // config.heads
        norm: Norm = nn.LayerNorm if config.norm_layer == "layernorm" else RMSNorm
        self.causal = config.causal
        self.rotary_width = head_width if config.pos_embed == "rope" else None
        self.token_embedding = nn.Embedding(size, width)
        if config.pos_embed == "learned":
            self.positional_embedding = nn.Parameter(torch.randn(config.context_length, width) * 0.01)
        swiglu = config.mlp_layer == "swiglu"
        blocks = [Block(width, config.heads, norm, config.qk_norm, swiglu) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.ln_final = norm(width)
        nn.init.normal_(self.token_embedding.weight, std=config.token_std)
        last = (2 * width * config.layers) ** -0.5
        for block in blocks:
            layers: list[Any] = [block.attention.query, block.attention.key_value, block.attention.out, *block.mlp[::2]]
            for layer, std in zip(layers, (width**-0.5, width**-0.5, last, (2 * width) ** -0.5, last), strict=True):
                nn.init.normal_(layer.weight, std=std)
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Map tokens ``(B, N)``, of which ``real`` are no padding, to ``(B, N, D)``."""
        x, length, angles = self.token_embedding(tokens), tokens.shape[1], None
        if self.rotary_width is None:
            x = x + self.positional_embedding[:length]
        else:
            angles = rotary_angles(length, self.rotary_width, x)
        mask = None if self.causal else attendable(real)  # padding is behind the tokens
        for block in self.blocks:
            x = block(x, mask, self.causal, angles)
        return self.ln_final(x)


class BlockTextTower(TextTower):
    """A tower of `TextBlocks`."""

    def __init__(self, config: TransformerTowerConfig):
        vocabulary = config.vocabulary()
        super().__init__(TextBlocks(config, vocabulary.size), config.width, vocabulary)

    def features(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Run the transformer."""
        return self.transformer(tokens, real)


def attendable(real: Tensor) -> Tensor:
    """Return ``real`` with rows without a real token all True: attention over nothing would be NaN."""
    return real | ~real.any(dim=1, keepdim=True)


class TransformerTowerConfig(TowerConfig):
    """A text transformer of your own size.

    Open_clip's module, or with `pos_embed`, `norm_layer`, `mlp_layer` or `qk_norm` other than CLIP's one of vqclip's
    blocks, with other names of weights.
    """

    kind: Literal["transformer"] = "transformer"
    context_length: int = Field(32, ge=4, le=MAX_CONTEXT)
    """Token positions per caption, marks included; longer captions are cut."""
    units: Literal["byte_pairs", "bytes"] = "byte_pairs"
    """Tokens of a caption. byte_pairs: open_clip's 49,408, for English. bytes: those of UTF-8, for any language and for
    models of a few MB; captions have about four times as many."""
    width: int = Field(512, ge=8, le=MAX_WIDTH)
    """Features per token."""
    heads: int = Field(8, ge=1)
    """Attention heads; must divide `width`."""
    layers: int = Field(12, ge=1, le=MAX_LAYERS)
    """Transformer blocks."""
    causal: bool = True
    """True: a token attends to earlier tokens only, as in CLIP. False: to the whole caption without padding."""
    pos_embed: Literal["learned", "rope"] = "learned"
    """Positions. learned: one vector for each, added to the tokens. rope: rotations of queries and keys, so that
    attention depends on the distance of tokens (rotary positions)."""
    norm_layer: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation: layernorm, or rmsnorm, which subtracts no mean and adds no bias."""
    mlp_layer: Literal["mlp", "swiglu"] = "mlp"
    """Feed-forward layers. mlp: GELU over four times the width. swiglu: gated SiLU over 8/3 of it, as many weights."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head by `norm_layer`, which bounds the scores of attention."""
    token_std: float = Field(0.02, gt=0, le=10)
    """Standard deviation of the initial token embeddings. CLIP's 0.02 suits long runs. In short runs the first steps
    move such small embeddings by more than their differences, so that words become similar; 1 avoids this."""

    @model_validator(mode="after")
    def _fits_together(self) -> TransformerTowerConfig:
        heads_divide_width(self)
        each = self.width // self.heads
        if self.pos_embed == "rope" and each % 2:
            raise ValueError(
                f"got pos_embed rope with {each} features per head; expected an even number, to turn pairs"
            )
        if self.qk_norm and each == 1:
            raise ValueError("got qk_norm with 1 feature per head, which it would make a constant; expected more")
        return self

    def build(self) -> TextTower:
        """Make the tower with random weights (torch's global generator)."""
        if (self.pos_embed, self.norm_layer, self.mlp_layer, self.qk_norm) != ("learned", "layernorm", "mlp", False):
            return set_training(BlockTextTower(self), self.train)
        from open_clip.transformer import TextTransformer

        transformer = TextTransformer(
            context_length=self.context_length,
            vocab_size=self.vocabulary().size,
            width=self.width,
            heads=self.heads,
            layers=self.layers,
            output_dim=None,
            pool_type="none",
            no_causal_mask=not self.causal,
            use_pad_mask=not self.causal,
        )
        nn.init.normal_(transformer.token_embedding.weight, std=self.token_std)
        return set_training(OpenCLIPTextTower(transformer, self.vocabulary()), self.train)

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary that maps captions to this tower's token numbers."""
        return (Bytes if self.units == "bytes" else BPE)(self.context_length)
