"""The card of a tokenizer folder: what the hub shows, and the first thing that its finder reads (Markdown)."""

from __future__ import annotations

FRONT = """---
library_name: vqclip
tags: [clip, image-tokenizer, text-tokenizer, vector-quantization]
# license: whoever publishes the weights names theirs here, such as apache-2.0
---
"""

USE = """
```python
import vqclip

tokenizer = vqclip.load_tokenizer(folder, modality="image")  # this folder, or its name on the hub
ids = tokenizer.encode(pictures)  # (B, N, C) int64; for modality="text" a list of captions
embedding = tokenizer.embed(ids)  # (B, E) unit-norm, in the joint space of images and texts
```

`tokenizer.decode(ids)` gives the vectors `(B, N, D)` for a downstream model. `load_tokenizer(folder, modality="image",
encode=False)` decodes and embeds stored ids without the tower, and without its library.
"""

NO_FIGURES = "No figures were given: the card of a run's own folder has those of its evaluation."


def card(title: str, what: str, more: str = NO_FIGURES) -> str:
    """A card.

    Args:
        title: its first line.
        what: the tokenizers in a sentence or two.
        more: what is known of them: figures, data, how they came to be.
    """
    return f"{FRONT}# {title}\n\n{what}\n{USE}\n{more.rstrip()}\n"
