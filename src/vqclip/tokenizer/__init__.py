"""Tokenizers: image or text → ids → vectors → joint embedding.

    tower → project to the quantizer → quantizer → project back → pool → unit-norm embedding
                                           └→ ids

Everything after the quantizer sees the codes alone, so the embedding that training optimises is the one that stored
ids give: ``tok.embed(tok.encode(x))`` equals ``tok(x).embedding`` bit for bit in fp32.
"""

from typing import TYPE_CHECKING

from vqclip import lazy_getattr

if TYPE_CHECKING:
    from vqclip.tokenizer._public import *  # noqa: F403

__getattr__ = lazy_getattr(__name__)
