"""Data: shards, their index, the order of samples, decoding, transforms, batches.

After `vqclip.scenes`, whose drawn shards it reads; before `vqclip.towers`, which take its batches. The public names are
imported on first use, since a tokenizer needs only `decode` and `transforms`.

    sources/  ->  index  ->  order  ->  samples (read, decode, transform)  ->  loader  ->  Batch
"""

from typing import TYPE_CHECKING

from vqclip import lazy_getattr

if TYPE_CHECKING:
    from vqclip.data._public import *  # noqa: F403

__getattr__ = lazy_getattr(__name__)
