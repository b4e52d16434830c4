"""What every kind of task promises; a new kind needs a line in `TASKS`."""

import time
from typing import get_args

import pytest

from tests.evaluation.made import CAPTIONS, caption_shards, class_shards, class_tar, png, tiny_clip
from vqclip import dist
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.evaluation import (
    MODES,
    EvaluationConfig,
    KnnConfig,
    LinearProbeConfig,
    PixelQualityConfig,
    RetrievalConfig,
    ZeroShotConfig,
    evaluate,
    format_results,
    scalar_names,
)
from vqclip.evaluation.pixels import QUALITY
from vqclip.model import CLIP
from vqclip.pixels import ConvolutionalPixelsConfig, attach


def TASKS(folder):
    labelled = {"data": ClassShardsConfig(path=folder / "test"), "max_bad_fraction": 0.5}
    probe = labelled | {"train": ClassShardsConfig(path=folder / "train", split="test")}
    return [
        ZeroShotConfig(**labelled),
        RetrievalConfig(data=CaptionShardsConfig(path=str(folder / "captions"), captions="txt_lines")),
        KnnConfig(**probe, neighbours=5),
        LinearProbeConfig(**probe, features="tokens"),
        PixelQualityConfig(**labelled, codecs=("webp",)),
    ]


@pytest.fixture
def folder(tmp_path):
    """Small data for every task; some images of the labelled sets cannot be used, all of them of one of two ranks."""
    for name, count in (("test", 14), ("train", 30)):
        class_shards(tmp_path / name, count)
        class_tar(tmp_path / name / "test" / "00.tar", [b"no image", png(9), b"no image", png(27)], [0, 1, 0, 1])
    caption_shards(tmp_path / "captions", CAPTIONS)
    model = tiny_clip({"kind": "fsq", "levels": [2, 2]})
    decoder = ConvolutionalPixelsConfig(channels=4, max_channels=8, channels_per_group=2)
    attach(model.image, decoder.build(model.image.quantizer.dim, model.image.num_tokens, 16))
    model.save_pretrained(tmp_path / "model")
    return tmp_path


def run(folder, distributed, who):
    model = CLIP.from_pretrained(folder / "model").train()
    if dist.rank() not in who:
        return None
    return [result.to_json() for result in evaluate(model, TASKS(folder), distributed=distributed)]


def rows_of(result):
    """The figures of each method of an evaluation of pixels."""
    return result["pixels"]["rows"] if result["pixels"] else []


def test_figures_have_the_names_that_are_promised_and_chance_beside_them(folder):
    tasks = TASKS(folder)
    assert {type(task) for task in tasks} == set(get_args(get_args(EvaluationConfig)[0])), "a kind is missing here"
    results = evaluate(CLIP.from_pretrained(folder / "model"), tasks)
    found = {name for result in results for name in result.scalars()}
    assert set(scalar_names(tasks)) <= found
    for task, result in zip(tasks, results, strict=True):
        assert (result.name, result.kind) == (task.name, task.kind)
        codes_only = {**result.figures["codes_only"]}
        assert codes_only.pop("id_agreement", None) is None or result.kind == "pixels"
        assert codes_only == result.figures["quantized"]
        for mode in MODES:
            figures = result.figures[mode]
            rates = {name: rate for name, rate in figures.items() if name not in (*QUALITY, "id_agreement")}
            assert rates.keys() == result.chance.keys()
            assert figures.keys() >= set(task.figures)
            assert all(0 <= rate <= 1 for rate in (*rates.values(), *result.chance.values()))
    assert len(set(scalar_names(tasks))) == len(scalar_names(tasks))
    assert format_results(results).count("\n") > 10


def test_two_ranks_find_what_one_finds_and_one_alone_does_not_wait(ranks, folder):
    alone = [result.to_json() for result in evaluate(CLIP.from_pretrained(folder / "model"), TASKS(folder))]
    assert alone[0]["notes"] == ["2 of 18 images cannot be used and are left out"]
    assert 0 < alone[-1]["figures"]["codes_only"]["id_agreement"] < 1
    for found in ranks(2, run, folder, True, (0, 1)):
        for result, expected in zip(found, alone, strict=True):
            for mode in MODES:
                assert result["figures"][mode] == pytest.approx(expected["figures"][mode], rel=1e-4)
                for figure, ends in result["intervals"].get(mode, {}).items():
                    assert ends == pytest.approx(expected["intervals"][mode][figure], rel=1e-4)
            for row, known in zip(rows_of(result), rows_of(expected), strict=True):
                assert row.pop("figures") == pytest.approx(known["figures"], rel=1e-4)
                for ends, others in zip(row.pop("intervals").values(), known["intervals"].values(), strict=True):
                    assert ends == pytest.approx(others, rel=1e-4)
                assert row == {name: known[name] for name in row}
            apart = dict.fromkeys(("figures", "pixels", "intervals"))
            assert {**result, **apart} == {**expected, **apart}
    start = time.monotonic()
    assert ranks(2, run, folder, False, (0,), timeout=60.0) == [alone, None]
    assert time.monotonic() - start < 50
