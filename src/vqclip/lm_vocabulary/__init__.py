"""Ids for language models: the codes of one or both tokenizers as numbers of one vocabulary, and back.

Three layouts, each exact both ways, with -1 (padding, dropped stages) as well:

- `FlatCodes`: one sequence of N·C ids a sample, every codebook in a range of its own.
- `DelayedCodes`: C streams side by side, each one step later than the one before (MusicGen).
- `Vocabulary`: `FlatCodes` of images and texts behind a language model's own ids, with marks of begin, end, padding.

`resize` makes room for them in a table of embeddings.

Shapes: B samples, N tokens, C codebooks, K codes, H width of a language model's embeddings.
"""

from vqclip.lm_vocabulary.delayed import DelayedCodes
from vqclip.lm_vocabulary.embedding import mean_rows, projected_rows, resize
from vqclip.lm_vocabulary.flat import FlatCodes
from vqclip.lm_vocabulary.joint import Vocabulary

__all__ = ["DelayedCodes", "FlatCodes", "Vocabulary", "mean_rows", "projected_rows", "resize"]
