"""Tokenizers: image or text → ids → vectors → joint embedding.

    tower → project to the quantizer → quantizer → project back → pool → unit-norm embedding
                                           └→ ids

Everything after the quantizer sees the codes alone, so the embedding that training optimises is the one that stored
ids give: ``tok.embed(tok.encode(x))`` equals ``tok(x).embedding`` bit for bit in fp32.
"""

from vqclip.tokenizer.base import Tokenizer, TokenizerOutput, tower_errors_in
from vqclip.tokenizer.image import ImageTokenizer, ImageTokenizerConfig
from vqclip.tokenizer.text import TextTokenizer, TextTokenizerConfig

__all__ = [
    "ImageTokenizer",
    "ImageTokenizerConfig",
    "TextTokenizer",
    "TextTokenizerConfig",
    "Tokenizer",
    "TokenizerOutput",
    "tower_errors_in",
]
