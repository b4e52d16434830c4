"""Ids for language models: the codes of one or both tokenizers as numbers of one vocabulary, and back.

Three layouts, each exactly invertible, also for -1 (padding, dropped stages):

- `FlatCodes`: one sequence of N·C ids a sample, every codebook in a range of its own.
- `DelayedCodes`: C streams side by side, each one step later than the previous one (MusicGen).
- `Vocabulary`: `FlatCodes` of images and texts after a language model's own ids, with begin, end and padding marks.

`resize` adds rows for them to an embedding table. `CodesEmbedding` and `CodesHead` read and write all C codes of a
token in one step of a model, without a common vocabulary; `MaskedBitsHead` writes them bit by bit.

After `vqclip.nn`, whose input checks it uses; before `vqclip.tokenizer`, whose `to_vocabulary` uses it.

Shapes: B samples, N tokens, C codebooks, K codes, H width of a language model's embeddings.
"""

from vqclip.lm_vocabulary.bits import MaskedBitsHead, MaskedBitsHeadConfig
from vqclip.lm_vocabulary.embedding import mean_rows, projected_rows, resize
from vqclip.lm_vocabulary.head import CodesEmbedding, CodesHead, CodesHeadConfig
from vqclip.lm_vocabulary.layouts import DelayedCodes, FlatCodes, Vocabulary

__all__ = [
    "CodesEmbedding",
    "CodesHead",
    "CodesHeadConfig",
    "DelayedCodes",
    "FlatCodes",
    "MaskedBitsHead",
    "MaskedBitsHeadConfig",
    "Vocabulary",
    "mean_rows",
    "projected_rows",
    "resize",
]
