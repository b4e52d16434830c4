"""k nearest neighbours and the linear probe: their mathematics, and figures of models whose answer is known."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from tests.evaluation.made import IDENTITY, PlainModel, class_shards, number_shards, tiny_clip
from vqclip.data import ClassShardsConfig, decode_image
from vqclip.errors import DataError
from vqclip.evaluation import KnnConfig, LinearProbeConfig, ZeroShotConfig, evaluate, prepare, probes, ranking
from vqclip.evaluation.probes import fit_logistic, logits, vote


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: F.normalize(torch.randn(*shape, generator=generator), dim=-1)


def test_votes_equal_the_definition_without_ties(rows, monkeypatch):
    queries, bank, labels, right = rows(30, 4), rows(60, 4), torch.arange(60) % 7, torch.arange(30) % 7
    expected, winners = [], []
    for query, own in zip(queries, right, strict=True):
        scores, near = (bank @ query).topk(9)
        votes = torch.zeros(7)
        for score, label in zip(scores, labels[near], strict=True):
            votes[label] += math.exp(score / 0.07)
        order = votes.argsort(descending=True)
        winners.append(int(order[0]))
        expected.append((own in order[:1], own in order[:5]))
    found, predicted = vote(queries, bank, right, labels, 7, 9, 0.07)
    assert predicted.tolist() == winners
    in_top1, in_top5 = zip(*expected, strict=True)
    assert found[0].tolist() == list(in_top1)
    assert all(abs(a - b) < 1e-9 or a < 1 for a, b in zip(found[1].tolist(), in_top5, strict=True))
    monkeypatch.setattr(ranking, "BLOCK", 60 * 7)
    assert torch.equal(vote(queries, bank, right, labels, 7, 9, 0.07).hits, found)


def test_neighbours_that_are_equally_near_share_the_places_and_equal_classes_are_in_random_order():
    query = torch.tensor([[1.0, 0.0]])
    bank = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8], [0.6, 0.8]])
    labels = torch.tensor([0, 1, 1, 2])
    for own, hit in ((0, 1.0), (1, 0.0), (2, 0.0)):
        assert vote(query, bank, torch.tensor([own]), labels, 3, 2, 0.07).hits[0].item() == hit
    bank[0] = F.normalize(torch.tensor([0.602, 0.8]), dim=0)  # a little nearer than the three, which share one vote
    assert vote(query, bank, torch.tensor([0]), torch.tensor([0, 1, 1, 1]), 2, 2, 0.07).hits[0].item() == 1.0
    same = torch.ones(6, 2)
    for own, hit in ((0, 0.5), (1, 0.5), (2, 0.0)):
        found = vote(same[:1], same, torch.tensor([own]), torch.tensor([0, 0, 1, 1, 2, 3]), 4, 3, 0.07)
        assert found.hits[0].item() == pytest.approx(hit)
        assert found.predicted.item() == 0  # the first of classes with equally many votes


def test_logistic_regression_equals_sklearns(rows, monkeypatch):
    x = rows(120, 5).double() * 3
    labels = ((x @ rows(5, 3).double()) + 0.5 * rows(120, 3)).argmax(1)
    l2 = 0.01
    theirs = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-8, max_iter=1000).fit(x.numpy(), labels.numpy())
    expected = torch.from_numpy(theirs.predict_log_proba(x.numpy()))
    monkeypatch.setattr(probes, "BLOCK", 3 * 50)  # three blocks
    weights = fit_logistic(x, labels, 3, l2)
    assert torch.allclose(logits(weights, x).log_softmax(1), expected, atol=1e-3)
    again = fit_logistic(x, labels, 3, l2, start=weights)
    assert torch.allclose(again, weights, atol=1e-3)
    with torch.inference_mode():  # as callers may be
        again = fit_logistic(x.clone(), labels, 3, l2)
    assert torch.allclose(again, weights, atol=1e-3)


def numbers(folder, train, test, classes=4):
    """Data with the training labels ``train`` and the test labels ``test``."""
    number_shards(folder, train, classes)
    (folder / "test").rename(folder / "train")
    number_shards(folder, test, classes)
    both = {"data": ClassShardsConfig(path=folder), "train": ClassShardsConfig(path=folder)}  # test and train
    return [KnnConfig(**both, neighbours=3), LinearProbeConfig(**both)]


def test_perfect_codes_score_100_percent_and_the_blind_path_knows_only_how_many_each_class_has(tmp_path):
    tasks = numbers(tmp_path, [0] * 10 + [1, 2, 3] * 6, [0, 0, 1, 2, 3])
    for prefix, result in zip(("knn", "linear"), evaluate(PlainModel(4), tasks), strict=True):
        names = [f"{prefix}_{name}" for name in ("top1", "top5", "mean_per_class")]
        assert result.figures["codes_only"] == dict.fromkeys(names, 1.0)
        assert result.chance == dict(zip(names, (0.4, 1.0, 0.25), strict=True))
        assert result.figures["continuous"] == pytest.approx(result.chance)
        assert (result.samples, result.classes, result.captions) == (5, 4, 0)
        assert result.usage["image"].codes_used == [4]
    assert result.notes[-1].startswith("L2 of the linear probe: continuous ")


def test_features_may_be_the_mean_of_the_decoded_tokens(tmp_path):
    folder, model = class_shards(tmp_path), tiny_clip()
    data = ClassShardsConfig(path=folder, split="test")
    again = ClassShardsConfig(path=f"{folder}/", split="test")
    task = KnnConfig(data=data, train=again, neighbours=1, features="tokens")
    other = task.model_copy(update={"features": "embedding", "name": "other"})
    found, embedding = evaluate(model, [task, other])
    assert found.figures["codes_only"] == found.figures["quantized"]
    assert found.figures["continuous"]["knn_top1"] == 1.0  # each image is its own neighbour
    assert found.usage == embedding.usage
    source = data.build()
    with torch.no_grad():
        pixels = torch.stack([model.image.transform(decode_image(source.read(i).image)) for i in range(len(source))])
        mean = F.normalize(model.eval().image.decode(model.image.encode(pixels)).mean(dim=1), dim=-1)
    labels = torch.tensor([source.read(i).label for i in range(len(source))])
    expected = vote(mean, mean, labels, labels, 4, 1, 0.07)
    assert found.figures["codes_only"]["knn_top1"] == pytest.approx(float(expected.hits[0].mean()))


def test_tasks_in_a_row_share_images_and_a_probe_uses_its_limits(tmp_path):
    folder, model, seen = class_shards(tmp_path), tiny_clip(IDENTITY), []
    model.image.tower.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    data = ClassShardsConfig(path=folder, split="test")
    probe = {"data": data, "train": ClassShardsConfig(path=f"{folder}/", split="test"), "train_limit": 12}
    tasks = [ZeroShotConfig(data=data), KnnConfig(**probe, neighbours=2), LinearProbeConfig(**probe, l2=0.1)]
    prepare(tasks)
    results = evaluate(model, tasks)
    assert sum(seen) == 22 + 12
    assert [result.samples for result in results] == [22, 22, 22]
    assert results[1].figures["codes_only"] is None
    assert results[1].notes == ["no codes-only figures: the image quantizer has no codebook (Identity)"]


@pytest.mark.parametrize(
    ("train", "change", "message"),
    [
        ([0, 1, 2, 3], {}, "k-NN: got 4 training images, expected at least 20"),
        ([0, 1, 2, 3] * 4, {}, "linear probe: got fewer than 5 training images of every class"),
        ([0], {"classnames.txt": "a\nb\n"}, "classes that only the test images have: 0, 1, 2, 3"),
    ],
)
def test_too_few_or_other_training_images_are_refused(tmp_path, train, change, message):
    tasks = numbers(tmp_path / "test", [0], [0, 1])
    numbers(tmp_path / "train", train, [0])
    for name, text in change.items():
        (tmp_path / "train" / name).write_text(text)
    data = {"data": tasks[0].data, "train": ClassShardsConfig(path=tmp_path / "train")}
    task = (LinearProbeConfig if message.startswith("linear") else KnnConfig)(**data)
    with pytest.raises(DataError, match=message):
        evaluate(PlainModel(4), [task])
    (tmp_path / "train" / "train" / "0.tar").unlink()
    with pytest.raises(DataError, match=r"^evaluation\[0\].train: .*train"):
        prepare([task])
