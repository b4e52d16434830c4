import itertools

import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.metrics import zeroshot_classification
from torch import nn

from vqclip.evaluation import ranking
from vqclip.evaluation.intervals import class_intervals, class_mean_intervals, ratio_intervals, wilson
from vqclip.evaluation.ranking import DEPTHS, class_figures, rank
from vqclip.evaluation.zero_shot import class_embeddings
from vqclip.process import progress


def hit_rates(queries, candidates, query_group, group, ks):
    """Share of queries with a right candidate among their k nearest."""
    return rank(queries, candidates, query_group, group).hits(ks).mean(dim=1).tolist()


def brute_force(queries, candidates, query_group, group, k):
    """The mean over all orders of tied candidates, one by one."""
    total = 0.0
    for query, right in zip(queries, query_group, strict=True):
        scores = [float(query @ candidate) for candidate in candidates]
        hits = []
        for order in itertools.permutations(range(len(scores))):
            if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
                hits.append(any(group[place] == right for place in order[:k]))
        total += sum(hits) / len(hits)
    return total / len(queries)


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_mean_over_all_orders_of_ties_with_several_right_ones(seed):
    generator = torch.Generator().manual_seed(seed)
    # Few different values: many ties, all of them exact.
    queries = torch.randint(-1, 2, (5, 2), generator=generator).float()
    candidates = torch.randint(-1, 2, (6, 2), generator=generator).float()
    group = torch.tensor([0, 0, 1, 2, 2, 2])
    query_group = torch.randint(0, 3, (5,), generator=generator)
    ks = [1, 2, 3, 10]
    expected = [brute_force(queries, candidates, query_group, group, k) for k in ks]
    assert hit_rates(queries, candidates, query_group, group, ks) == pytest.approx(expected, abs=1e-12)


def test_rounding_does_not_break_a_tie():
    queries, candidates = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.0], [0.5 + 1e-6, 0.0], [0.4, 0.0]])
    for right in (0, 1):
        assert hit_rates(queries, candidates, torch.tensor([right]), torch.arange(3), [1]) == [0.5]


def test_blocks_change_nothing_bound_the_scores_and_show_that_the_work_goes_on(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(torch.randn(101, 8, generator=generator), dim=-1)
    noisy = F.normalize(x + 0.6 * torch.randn(101, 8, generator=generator), dim=-1)
    each = torch.arange(101)
    whole = hit_rates(x, noisy, each, each, [1, 5])
    monkeypatch.setattr(ranking, "BLOCK", 101 * 7)
    seen = []
    rank = ranking.rank_scores
    monkeypatch.setattr(ranking, "rank_scores", lambda a, *rest: (seen.append(len(a)), rank(a, *rest))[1])
    beats = []
    with progress.report_to(lambda: beats.append(1)):
        assert hit_rates(x, noisy, each, each, [1, 5]) == whole
    assert max(seen) == 7
    assert len(beats) == len(seen) == 15
    assert 0.1 < whole[0] < whole[1] < 1


CLASSES, TEMPLATES, WIDTH = 12, 3, 8


class Rows(nn.Module):
    """A model whose inputs are numbers of rows of given embeddings, of any length."""

    def __init__(self, images, texts):
        super().__init__()
        self.encode_image = lambda numbers: 3 * images[numbers]
        self.encode_text = lambda numbers: 5 * texts[numbers]


class Loader(list):
    """Batches, with the classes that clip_benchmark asks for."""

    class dataset:
        classes = range(CLASSES)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classification_is_that_of_clip_benchmark(monkeypatch):
    """On random scores, which have no ties."""
    # It makes a number of an array of one, which numpy 2.4 and later refuse.
    monkeypatch.setattr(zeroshot_classification, "float", lambda array: array[0].item(), raising=False)
    generator, sizes = torch.Generator().manual_seed(0), ((200, WIDTH), (CLASSES * TEMPLATES, WIDTH))
    images, prompts = (F.normalize(torch.randn(*size, generator=generator), dim=-1) for size in sizes)
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


# Intervals of figures.


@pytest.mark.parametrize(
    ("rate", "count", "low", "high"),  # Newcombe (1998), table I, method 3
    [
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(rate, count, low, high):
    assert wilson(rate, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - rate, count) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_captions_of_one_image_count_together():
    counts = torch.full((100,), 5)
    image_hits = (torch.arange(100) % 2).double()
    together = image_hits.repeat_interleave(5)[None]  # all captions of an image are hit or none
    apart = (torch.arange(500) % 2).double()[None]
    (wide,), (narrow,) = ratio_intervals(together, counts), ratio_intervals(apart, counts)
    low, high = wilson(0.5, 100)
    assert wide == pytest.approx((low, high), abs=0.03)
    assert narrow[1] - narrow[0] < 0.2 * (high - low)
    assert ratio_intervals(together, counts) == [wide]  # the draws are keyed


def test_images_with_more_captions_weigh_more_and_without_images_nothing_is_known():
    assert wilson(float("nan"), 0) == (0, 1)
    assert class_intervals(("a", "b", "c"), {}, torch.empty(0, dtype=torch.int64)) == {}
    counts = torch.tensor([1, 3] * 50)
    hits = torch.tensor([[1.0, 0, 0, 0] * 50], dtype=torch.float64)
    ((low, high),) = ratio_intervals(hits, counts)
    assert low < 0.25 < high
    assert high < 0.4


def test_mean_over_classes_against_its_standard_error():
    labels = torch.arange(400) % 4
    hits = torch.zeros(1, 400, dtype=torch.float64)
    hits[0, (labels == 0) | ((labels == 1) & (torch.arange(400) % 8 == 1))] = 1
    ((low, high),) = class_mean_intervals(hits, labels)
    error = (0.5 * 0.5 / 100) ** 0.5 / 4  # one class of 100 images varies
    assert (low, high) == pytest.approx((0.375 - 1.96 * error, 0.375 + 1.96 * error), abs=0.006)
