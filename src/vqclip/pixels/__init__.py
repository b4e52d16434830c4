"""Pixel decoders: from the ids of images back to images.

    tokenizer.encode(images) → ids → code vectors → pixel decoder → images

    decoder = ConvolutionalPixelsConfig().build(tokenizer.quantizer.dim, tokenizer.num_tokens, image_size=64)
    attach(tokenizer, decoder)         # then tokenizer.decode_pixels(ids) and tokenizer.save_pretrained(folder)

After `vqclip.towers`; before `vqclip.tokenizer`, of which a decoder is a part. Importing this package imports no tower.
"""

from vqclip.pixels.decoder import (
    ConvolutionalPixelsConfig,
    PixelDecoder,
    PixelDecoderConfig,
    PixelsConfig,
    TransformerPixelsConfig,
    attach,
)
from vqclip.pixels.detail import Detail, DetailConfig

__all__ = [
    "ConvolutionalPixelsConfig",
    "Detail",
    "DetailConfig",
    "PixelDecoder",
    "PixelDecoderConfig",
    "PixelsConfig",
    "TransformerPixelsConfig",
    "attach",
]
