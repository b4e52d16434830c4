"""The card of a tokenizer folder: the page that the hub shows (Markdown)."""

from __future__ import annotations

FRONT = """---
library_name: vqclip
tags: [clip, image-tokenizer, text-tokenizer, vector-quantization]
# license: add the license of the weights here, such as apache-2.0
---
"""

USE = """
```python
import vqclip

tokenizer = vqclip.load_tokenizer(folder, modality="image")  # this folder, or its name on the hub
ids = tokenizer.encode(images)  # (B, N, C) int64; for modality="text" a list of captions
embedding = tokenizer.embed(ids)  # (B, E) unit-norm, in the joint space of images and texts
```

`tokenizer.decode(ids)` returns the vectors `(B, N, D)` for a downstream model. With a pixel decoder in the folder
(`pixels.safetensors`), `tokenizer.to_pil(tokenizer.decode_pixels(ids))` returns images.
`load_tokenizer(folder, modality="image", encode=False)` decodes and embeds stored ids without the tower and its
library.
"""

NO_FIGURES = "No figures were given: the card of a run's own folder has those of its evaluation."


def card(title: str, what: str, more: str = NO_FIGURES) -> str:
    """Return a card.

    Args:
        title: first line.
        what: description of the tokenizers in a sentence or two.
        more: figures, data, training.
    """
    return f"{FRONT}# {title}\n\n{what}\n{USE}\n{more.rstrip()}\n"
