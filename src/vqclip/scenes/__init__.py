"""The drawn data set: coloured shapes with captions, made once as ordinary shards.

After `vqclip.process`, whose progress it reports; before `vqclip.data`, which reads the shards.

Layout of a data set's folder:

    train/00000.tar ...      captioned, img2dataset layout; combinations of colour and shape in `TRAINED`
    val/00000.tar            captioned; only combinations in `HELD_OUT`; every caption fits only its own image
    test/                    clip_benchmark layout: single objects of trained combinations, 99 classes
    heldout/                 the same for held-out combinations, classified among all 121 classes
    scenes.json              configuration, file sizes and checksums

Every sample's `.json` contains its scene: the objects and the background. `vqclip data draw` draws it.
"""

from vqclip.scenes.make import ScenesConfig, make_scenes
from vqclip.scenes.splits import HELD_OUT, TRAINED

__all__ = ["HELD_OUT", "TRAINED", "ScenesConfig", "make_scenes"]
