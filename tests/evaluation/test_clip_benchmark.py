"""Our figures beside clip_benchmark's own functions, on random scores (which have no ties)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from torch import nn

from vqclip.evaluation.ranking import DEPTHS, class_figures, rank
from vqclip.evaluation.retrieval import both_ranks, recalls
from vqclip.evaluation.zero_shot import class_embeddings

CLASSES, TEMPLATES, WIDTH = 12, 3, 8


class Rows(nn.Module):
    """A model whose inputs are numbers of rows of given embeddings, of any length."""

    def __init__(self, images, texts):
        super().__init__()
        self.images, self.texts = images, texts

    def encode_image(self, numbers):
        return 3 * self.images[numbers]

    def encode_text(self, numbers):
        return 5 * self.texts[numbers]


class Loader(list):
    """Batches, with the classes that clip_benchmark asks for."""

    class dataset:
        classes = range(CLASSES)


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: F.normalize(torch.randn(*shape, generator=generator), dim=-1)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classification(draw, monkeypatch):
    # It makes a number of an array of one, which numpy 2.4 and later refuse.
    monkeypatch.setattr(zeroshot_classification, "float", lambda array: array[0].item(), raising=False)
    images, prompts = draw(200, WIDTH), draw(CLASSES * TEMPLATES, WIDTH)
    labels = (torch.arange(200) ** 2) % 11  # of unequal size, and one of 12 does not occur
    batches = Loader((torch.arange(start, start + 50), labels[start : start + 50]) for start in range(0, 200, 50))
    names = {f"{n}|{t}": n * TEMPLATES + t for n in range(CLASSES) for t in range(TEMPLATES)}
    expected = zeroshot_classification.evaluate(
        Rows(images, prompts),
        batches,
        lambda texts: torch.tensor([names[text] for text in texts]),
        [str(n) for n in range(CLASSES)],
        [f"{{c}}|{t}" for t in range(TEMPLATES)],
        "cpu",
        amp=False,
    )
    classes = class_embeddings(prompts, [TEMPLATES] * CLASSES)
    found = class_figures(rank(images, classes, labels, torch.arange(CLASSES)).hits(DEPTHS), labels)
    assert list(found.values()) == pytest.approx([expected[key] for key in ("acc1", "acc5", "mean_per_class_recall")])
    assert found["top1"] != pytest.approx(found["mean_per_class"])


def test_retrieval_with_several_captions_an_image(draw):
    counts = torch.tensor([1, 5, 2, 3, 1, 4] * 5)
    images = draw(len(counts), WIDTH)
    captions = F.normalize(images.repeat_interleave(counts, dim=0) + 1.5 * draw(int(counts.sum()), WIDTH), dim=-1)
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    texts = [(owner == image).nonzero().flatten().tolist() for image in range(len(counts))]
    batches = [(torch.arange(start, start + 6), texts[start : start + 6]) for start in range(0, len(counts), 6)]
    expected = zeroshot_retrieval.evaluate(
        Rows(images, captions), batches, torch.tensor, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    found = recalls(both_ranks(images, captions, counts))
    assert found == pytest.approx(
        {f"i2t_r{k}": expected[f"text_retrieval_recall@{k}"] for k in (1, 5, 10)}
        | {f"t2i_r{k}": expected[f"image_retrieval_recall@{k}"] for k in (1, 5, 10)}
    )
    assert 0.2 < found["i2t_r1"] < found["i2t_r5"] < 1
