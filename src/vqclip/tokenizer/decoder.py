"""Decode ids: the part of a tokenizer after the quantizer, without tower, images or captions.

    ids → quantizer ─→ project_out ─→ vectors for a downstream model
                   │             └→ pool → unit-norm embedding
                   └→ pixel decoder, if there is one → images

`vqclip.tokenizer.encoder` adds the part that encodes. Nothing here imports a tower's library, torchvision or Pillow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config, Modality
from vqclip.config.bounds import MAX_LAYERS, MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError, VqclipError
from vqclip.lm_vocabulary import FlatCodes
from vqclip.nn.inputs import require_ids
from vqclip.nn.layers import LinearProjectionConfig, PooledEmbedding, Projection, ProjectionConfig, heads_divide_width
from vqclip.nn.precision import Precision, autocast, full_precision
from vqclip.nn.shapes import shape_mask, shapes_of
from vqclip.pixels.decoder import PIXELS_FILE, PixelDecoder
from vqclip.quantizers import Quantizer, QuantizerConfig, codebook_matrix

if TYPE_CHECKING:
    from PIL.Image import Image


class DecoderConfig(Config):
    """The part of a tokenizer's section that decoding needs."""

    quantizer: QuantizerConfig
    """From features to codes."""
    width: int = Field(256, ge=8, le=MAX_WIDTH)
    """D, width of the vectors that `decode` returns."""
    heads: int = Field(4, ge=1)
    """Attention heads after the quantizer; must divide `width`."""
    depth: int = Field(1, ge=0, le=MAX_LAYERS)
    """Transformer blocks between the codes and the pooling."""
    project_out: ProjectionConfig = LinearProjectionConfig()
    """From the codes to `width`."""

    _heads_divide_width = model_validator(mode="after")(heads_divide_width)

    def build_output(self, quantizer: Quantizer, num_tokens: int, embed_dim: int) -> tuple[Projection, PooledEmbedding]:
        """Make ``project_out`` and ``pool``, with random weights."""
        project_out = Projection(*self.project_out.layers(quantizer.dim, self.width))
        return project_out, PooledEmbedding(num_tokens, self.width, embed_dim, self.heads, self.depth)


class TokenizerDecoder(nn.Module):
    """Ids → vectors and embeddings: a tokenizer without its tower, and the base of those with one.

    ``load_tokenizer(..., encode=False)`` returns one.

    Args:
        modality: ``"image"`` or ``"text"``.
        quantizer: ids to code vectors.
        project_out: code vectors to the vectors that `decode` returns.
        pool: these to the joint embedding.
        fewest_tokens: smallest number of tokens in a batch: N, or less if positions at the end may be padding.
        before: modules before the quantizer, by name; their parameters come first.
    """

    config: Any
    quantizer: Quantizer
    project_out: Projection
    pool: PooledEmbedding
    pixels: PixelDecoder | None
    """Codes to images; None unless `vqclip.pixels.attach` was called, or the folder has a decoder."""
    stored_dtype: torch.dtype | None = None
    """Floating-point type of the weights in the folder, never rounded to half precision; None if not from a folder."""

    def __init__(
        self,
        modality: Modality,
        quantizer: Quantizer,
        project_out: Projection,
        pool: PooledEmbedding,
        fewest_tokens: int,
        before: Mapping[str, nn.Module] | None = None,
    ):
        super().__init__()
        for name, part in (before or {}).items():
            self.add_module(name, part)
        self.modality = modality
        self.quantizer = quantizer
        self.project_out = project_out
        self.pool = pool
        self.fewest_tokens = fewest_tokens
        pool.has_shapes = modality == "image" and fewest_tokens < self.num_tokens
        self.pixels = None

    @property
    def num_tokens(self) -> int:
        """N, tokens a sample (for text: positions, with padding)."""
        return len(self.pool.position)

    @property
    def has_shapes(self) -> bool:
        """Return whether images have any shape, which their ids keep; see `shapes`."""
        return self.pool.has_shapes

    @property
    def embed_dim(self) -> int:
        """E, width of the joint embedding."""
        return self.pool.head.out_features

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """K of each of the C codebooks."""
        return self.quantizer.codebook_sizes

    @property
    def bits_per_sample(self) -> float:
        """Tokens × Σ log2(codebook size); of a caption that fills every position, or an image of as many patches."""
        return (self.num_tokens - self.has_shapes) * self.quantizer.bits

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.pool.position.device

    def ids_mask(self, ids: Tensor) -> Tensor | None:
        """Return the mask ``(B, N)`` bool of ids ``(B, N, C)``: a token is absent when all its ids are -1.

        None for square images without absent patches, as in training, so that the sums are the same.

        Raises:
            ShapeError: absent tokens that make no shape, where images have any shape; see `shapes`.
        """
        mask = (require_ids(ids) >= 0).any(dim=-1)
        if self.modality != "image" or torch.compiler.is_compiling():  # reading values would break the graph
            return mask
        if self.has_shapes:
            wrong = (mask != shape_mask(shapes_of(mask), mask.shape[1])).any(dim=1) | (
                mask.sum(dim=1) == self.num_tokens
            )
            for row in wrong.nonzero().flatten().tolist():
                raise ShapeError(
                    f"ids[{row}]: got absent tokens (all ids -1) that are those of no image; expected one after its "
                    "first row, which tells its columns, whole rows, and absent tokens after the last one"
                )
            return mask
        return None if bool(mask.all()) else mask

    def shapes(self, ids: Tensor) -> Tensor:
        """Return rows and columns ``(B, 2)`` int64 of images of any shape, from their ids ``(B, N, C)``.

        Raises:
            VqclipError: images of this tokenizer are square.
            ShapeError: for another shape or dtype, or absent tokens that make no shape.
        """
        if not self.has_shapes:
            raise VqclipError("this tokenizer has no images of any shape; expected one with image.tower.kind: naflex")
        mask = self.ids_mask(self._require_shape(ids))
        assert mask is not None
        return shapes_of(mask)

    def decode(self, ids: Tensor) -> Tensor:
        """Map ids ``(B, N, C)`` to vectors ``(B, N, D)`` for a downstream model, 0 for an absent token (all ids -1).

        The ids may be of any integer type. A caller's autocast has no effect.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        codes, mask = self._lookup(ids), self.ids_mask(ids)
        with full_precision(self.device):
            vectors = self._project_out(codes, mask)
        return vectors if mask is None else vectors * mask.unsqueeze(-1)

    def embed(self, ids: Tensor, precision: Precision = "fp32") -> Tensor:
        """Map ids ``(B, N, C)`` to the joint embedding ``(B, E)``, unit-norm: from the codes alone.

        The ids may be of any integer type. ``precision`` decides, not a caller's autocast: ``"bf16"`` and ``"fp16"``
        are computed under autocast, the others in the type of the weights.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
        """
        with autocast(self.device, precision):
            return self._embed(self._lookup(ids), self.ids_mask(ids))

    @torch.no_grad()
    def decode_pixels(
        self, ids: Tensor, stages: int | None = None, codebooks: int | None = None, detail: int | None = None
    ) -> Tensor:
        """Decode ids ``(B, N, C)`` to images ``(B, 3, H, W)`` float32 in 0..1, without gradients or autocast.

        An image differs by at most about 1e-5 between batches of different sizes.

        Args:
            ids: of any integer type; -1 for an absent id. Detail ids may follow: ``(B, N, C + Cd)`` or fewer, as
                `ImageTokenizer.encode_pixels` returns them; those that are left out add nothing.
            stages: number of first residual stages to use; None: all that the pixel decoder reads. See `truncate`.
            codebooks: number of first codebooks to use; None: all.
            detail: number of first detail stages to use; None: all that the ids have.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
            ConfigError: no pixel decoder; or more stages or codebooks than the quantizer, the ids or it have.
        """
        decoder = self.require_pixels()
        ids, further = decoder.split(require_ids(ids), len(self.codebook_sizes), detail)
        stages = decoder.stages if stages is None else stages
        if decoder.stages is not None and stages is not None and stages > decoder.stages:
            raise ConfigError(f"stages: got {stages}, expected 1 to {decoder.stages}, the stages that pixels come from")
        if stages is not None or codebooks is not None:
            ids = self.truncate(ids, stages, codebooks)
        with full_precision(self.device):
            return self.pixels_of(self._lookup(ids), further).float().clamp(0, 1)

    def pixels_of(self, vectors: Tensor, detail: Tensor | None = None) -> Tensor:
        """Decode the quantizer's code vectors ``(B, N, quantizer.dim)`` to images ``(B, 3, H, W)``, with gradients.

        If the decoder reads first stages alone (`PixelDecoder.stages`), the vectors are those of
        ``quantizer.first_stages``. Values are not clamped and may be a little outside of 0..1; see
        `PixelDecoder.forward`, also for ``detail``.
        """
        return self.require_pixels()(vectors, detail)

    @staticmethod
    def to_pil(pixels: Tensor) -> list[Image]:
        """Convert images ``(B, 3, H, W)``, floating point in 0..1 or uint8, to PIL images.

        Raises:
            ShapeError: for another shape, dtype or range, or NaN.
        """
        from PIL import Image

        if pixels.ndim != 4 or pixels.shape[1] != 3:
            raise ShapeError(f"pixels: got shape {tuple(pixels.shape)}, expected (B, 3, H, W)")
        if pixels.is_floating_point():
            if not bool(((pixels >= 0) & (pixels <= 1)).all()):  # false for NaN, too
                raise ShapeError("pixels: got NaN or numbers outside of 0 to 1, expected 0 to 1: clamp(0, 1)")
            pixels = (pixels.detach() * 255).round().to(torch.uint8)
        if pixels.dtype != torch.uint8:
            raise ShapeError(f"pixels: got dtype {pixels.dtype}, expected floating point (0..1) or uint8 (0..255)")
        return [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()]

    def truncate(self, ids: Tensor, stages: int | None = None, codebooks: int | None = None) -> Tensor:
        """Replace the ids ``(B, N, C)`` outside of the first stages and codebooks by -1, to use fewer bits.

        `decode` and `embed` take the result; see `Quantizer.truncate`, also for errors.
        """
        return self.quantizer.truncate(self._require_shape(ids), stages, codebooks)

    def to_vocabulary(self, ids: Tensor, offset: int = 0) -> Tensor:
        """Map ids ``(B, N, C)`` to a sequence ``(B, N·C)`` for a language model, each codebook in its own range.

        The first code has the id ``offset``. See `FlatCodes`, which also has an id for -1; `vqclip.lm_vocabulary` has
        other layouts.

        Raises:
            ShapeError: for another shape or dtype, or an id outside its codebook.
            ConfigError: the tokenizer has no codebook, or more codes than int64 can count.
        """
        return FlatCodes(self.codebook_sizes, offset).to_vocabulary(self._require_shape(ids))

    def from_vocabulary(self, flat: Tensor, offset: int = 0) -> Tensor:
        """Invert `to_vocabulary`: ``(B, N·C)`` → ``(B, N, C)`` int64.

        Raises:
            ShapeError: for another shape (an image has all of its N tokens) or dtype, or an id outside the range of the
                codebook at its position.
        """
        ids = FlatCodes(self.codebook_sizes, offset).from_vocabulary(flat)
        return self._require_shape(ids, "vocabulary ids as (B, N, C)")

    def codebook(self, codebook: int) -> Tensor:
        """Return one codebook as a matrix ``(K, d)``, one row a code, of the quantizer's d channels.

        A token's code vector is the sum of its rows over the codebooks; see `codebook_matrix`, also for errors.
        """
        return codebook_matrix(self.quantizer, codebook)

    def encode(self, inputs: Any) -> Tensor:
        """Raise VqclipError: there is no tower. Tokenizers with one override this."""
        raise VqclipError(
            "this tokenizer was loaded with encode=False, to decode and embed ids, and has no tower; expected "
            f'load_tokenizer(folder, modality="{self.modality}"), which also encodes'
        )

    def encode_pixels(self, images: Any) -> Tensor:
        """Raise VqclipError: no pixel decoder, or no tower. Image tokenizers with a tower override this."""
        self.require_pixels()
        return self.encode(images)

    encode_detail = encode_pixels

    def files(self) -> dict[str, bytes]:
        """Return further files of the tokenizer folder by their names."""
        return {}

    def section(self) -> dict[str, object]:
        """Raise VqclipError: the fingerprint, by which an index knows its tokenizer, covers the tower too."""
        raise VqclipError(
            "this tokenizer was loaded with encode=False and has no fingerprint, which covers the tower; expected "
            f'load_tokenizer(folder, modality="{self.modality}") to build or search an index'
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        wanted = fn(torch.empty(0, dtype=self.pool.position.dtype, device=self.device)).dtype
        if (stored := self.stored_dtype) is not None and wanted.itemsize < 4 and wanted != stored:
            raise ConfigError(
                f"{type(self).__name__}: got a conversion to {wanted} of weights that were stored as {stored}: ids "
                f"would change. Expected {stored} or a wider one; convert other parts of your model, and the vectors "
                'of decode, instead, or pass precision="bf16" to encode and embed'
            )
        return super()._apply(fn, recurse)

    def _lookup(self, ids: Tensor) -> Tensor:
        return self.quantizer.decode(self._require_shape(ids))

    def _require_shape(self, ids: Tensor, name: str = "ids") -> Tensor:
        ids = require_ids(ids)
        codebooks = len(self.codebook_sizes)
        if ids.ndim != 3 or not self.fewest_tokens <= ids.shape[1] <= self.num_tokens or ids.shape[2] != codebooks:
            tokens = f"{self.num_tokens}" if self.fewest_tokens == self.num_tokens else f"1 to {self.num_tokens}"
            raise ShapeError(f"{name}: got shape {tuple(ids.shape)}, expected (B, {tokens}, {codebooks})")
        return ids

    def _embed(self, vectors: Tensor, mask: Tensor | None) -> Tensor:
        return self.pool(self._project_out(vectors, mask), mask)

    def _project_out(self, vectors: Tensor, mask: Tensor | None) -> Tensor:
        # Codes are fp32 numbers whatever the module's dtype is.
        return self.project_out(vectors.to(self.pool.position.dtype), mask)

    def require_codes(self, what: str) -> None:
        """Raise ConfigError if there is no codebook; the message begins with ``what``."""
        if not self.codebook_sizes:
            raise ConfigError(
                f"{what} the {self.modality} quantizer has no codes (Identity); expected one with a codebook"
            )

    def require_image_size(self, what: str) -> None:
        """Raise ConfigError if images have any shape, which ``what`` cannot take."""
        if self.has_shapes:
            raise ConfigError(
                f"image.tower.kind: got naflex, whose images have any shape, which {what} cannot take; expected a "
                "tower with an image_size"
            )

    def require_pixels(self) -> PixelDecoder:
        """Return the pixel decoder; raise ConfigError if there is none."""
        if self.pixels is None:
            raise ConfigError(
                f"this {self.modality} tokenizer has no pixel decoder; expected a folder with {PIXELS_FILE}, which a "
                "run with task: pixels writes, or vqclip.pixels.attach(tokenizer, decoder) before"
            )
        return self.pixels

    def pixels_section(self) -> dict[str, Any]:
        """Return the section of ``config.json`` on the pixel decoder; empty without one."""
        return {} if self.pixels is None else {"pixels": self.pixels.config.model_dump(mode="json")}
