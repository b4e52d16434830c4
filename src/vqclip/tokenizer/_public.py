"""Public names of `vqclip.tokenizer`, in a module of their own so that decoding does not import the towers."""

from vqclip.tokenizer.base import Tokenizer, TokenizerOutput
from vqclip.tokenizer.image import ImageTokenizer, ImageTokenizerConfig
from vqclip.tokenizer.text import TextTokenizer, TextTokenizerConfig

__all__ = [
    "ImageTokenizer",
    "ImageTokenizerConfig",
    "TextTokenizer",
    "TextTokenizerConfig",
    "Tokenizer",
    "TokenizerOutput",
]
