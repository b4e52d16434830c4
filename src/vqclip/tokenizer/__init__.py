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
    from vqclip.tokenizer._public import *  # noqa: F403

__getattr__ = lazy_getattr(__name__)
