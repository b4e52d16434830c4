"""Data: shards, their index, the order of samples, decoding, transforms, batches.

After `vqclip.dist` and `vqclip.scenes`; its batches go to the towers. The public names are imported when the first of
them is asked for: a tokenizer needs `decode` and `transforms` alone.
"""

from typing import TYPE_CHECKING

from vqclip import lazy_getattr

if TYPE_CHECKING:
    from vqclip.data._public import *  # noqa: F403

__getattr__ = lazy_getattr(__name__)
