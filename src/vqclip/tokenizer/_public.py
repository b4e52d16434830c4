"""The public names of `vqclip.tokenizer`, apart so that ids are decoded without the towers' libraries."""

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
