"""Tokenizers: image or text → ids → vectors → joint embedding.

    tower → project to the quantizer → quantizer → project back → pool → unit-norm embedding
                                           └→ ids

Everything after the quantizer sees only the codes, so training optimises the embedding that stored ids give:
``tok.embed(tok.encode(x))`` equals ``tok(x).embedding`` bit for bit in fp32.

After `vqclip.towers`, `vqclip.quantizers` and `vqclip.nn`, whose modules it combines; before `vqclip.model`, which
trains two of them.
"""

from typing import TYPE_CHECKING

from vqclip import lazy_getattr

if TYPE_CHECKING:
    from vqclip.tokenizer.encoder import ImageTokenizer as ImageTokenizer
    from vqclip.tokenizer.encoder import ImageTokenizerConfig as ImageTokenizerConfig
    from vqclip.tokenizer.encoder import TextTokenizer as TextTokenizer
    from vqclip.tokenizer.encoder import TextTokenizerConfig as TextTokenizerConfig
    from vqclip.tokenizer.encoder import Tokenizer as Tokenizer
    from vqclip.tokenizer.encoder import TokenizerOutput as TokenizerOutput

__all__ = [
    "ImageTokenizer",
    "ImageTokenizerConfig",
    "TextTokenizer",
    "TextTokenizerConfig",
    "Tokenizer",
    "TokenizerOutput",
]

__getattr__ = lazy_getattr(__name__, "encoder")  # so that decoding does not import the towers
