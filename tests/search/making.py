from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tests.models import PRODUCT, tiny_model


def built(quantizer=PRODUCT):
    torch.manual_seed(0)
    return tiny_model(quantizer, quantizer).build().eval()


def drawn(count=300, seed=1, tokens=4, size=64):
    """Ids of `PRODUCT`."""
    return torch.randint(0, size, (count, tokens, 2), generator=torch.Generator().manual_seed(seed))


def queries(count=5, width=16):
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(2)), dim=-1)


def reference(embeddings, asked, k):
    """The slow way: stable sorting keeps equal scores in the order of the items."""
    scores, items = (asked @ embeddings.T).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], items[:, :k]


def pictures(folder: Path, count=12) -> Path:
    rng = np.random.default_rng(0)
    (folder / "below").mkdir(parents=True)
    for number in range(count):
        name = f"below/<i>{number}_&.png" if number % 2 else f"{number:02d}.png"
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / name)
    (folder / ".hidden.png").write_bytes(b"")
    return folder
