"""Data: shards, their index, the order of samples, decoding, transforms, batches.

After `vqclip.scenes`, whose drawn shards it reads; before `vqclip.towers`, which take its batches. The public names are
imported on first use, since a tokenizer needs only `decode` and `transforms`.

    sources/  ->  index  ->  order  ->  samples (read, decode, transform)  ->  loader  ->  Batch

A sample is an extent of a file: of a tar or an image file, read in place, or of a tar that it was packed into once. It
passes seven calls to its bytes in a tar on this machine; `decode_image` and the transform follow:

    BatchMaker.fill -> SampleMaker.make -> ._make -> Source.read -> TarReader.read -> OpenFiles.read -> os.pread

Words, each with one meaning:

    source   samples that the configuration names together       shard    a tar (or table) of a source
    sample   image, captions, label                               member   a file in a tar
    extent   first byte and size of something in a file           chunk    consecutive samples: fetched as one
    index    table of shards, chunks and members                  part     of an index: what comes from one shard
    table    facts and arrays in a mapped file                    folder   a directory, here or in a store
    order    positions -> samples                                 window   chunks that are shuffled together
    record   what a work folder notes of a finished item          rank     a process of the job
"""

from typing import TYPE_CHECKING

from vqclip import lazy_getattr

if TYPE_CHECKING:
    from vqclip.data._public import *  # noqa: F403

__getattr__ = lazy_getattr(__name__)
