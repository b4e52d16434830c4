import dataclasses
import time

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from tests.evaluation.made import CAPTIONS, PlainModel, caption_shards, class_shards, tiny_clip
from tests.ranks import for_each
from vqclip import dist
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.errors import DataError
from vqclip.evaluation import (
    MODES,
    Evaluations,
    Result,
    RetrievalConfig,
    ZeroShotConfig,
    evaluate,
    format_figure,
    format_results,
    load_ids,
    prepare,
    try_all,
)
from vqclip.evaluation.encode import code_usage
from vqclip.model import CLIP


@pytest.fixture
def folder(tmp_path):
    class_shards(tmp_path / "classes")
    caption_shards(tmp_path / "captions", CAPTIONS)
    tiny_clip().save_pretrained(tmp_path / "model")
    return tmp_path


def tasks(folder, batch_size=4, limit=None):
    captions = CaptionShardsConfig(path=str(folder / "captions"), captions="txt_lines")
    return [
        ZeroShotConfig(data=ClassShardsConfig(path=folder / "classes"), batch_size=batch_size, limit=limit),
        RetrievalConfig(data=captions, batch_size=batch_size, limit=limit),
    ]


def evaluate_wrapped(folder):
    wrapped = dist.wrap_ddp(CLIP.from_pretrained(folder / "model").requires_grad_())
    assert not isinstance(wrapped, CLIP)
    return [result.to_json() for result in evaluate(wrapped, tasks(folder), distributed=dist.rank() < 0)]


def test_a_wrapped_model_is_unwrapped(ranks, folder):
    first, second = ranks(2, evaluate_wrapped, folder)
    assert first == second


def try_a_bad_sample(folder):
    zero_shot, bad = tasks(folder)
    again = bad.model_copy(update={"name": "again"})
    outcome = try_all(CLIP.from_pretrained(folder / "model"), [bad, zero_shot, again])
    return [result.name for result in outcome.results], type(outcome.failure).__name__, str(outcome.failure)


def test_a_task_that_fails_takes_nothing_from_the_others(ranks, folder):
    caption_shards(folder / "captions", [["fine"], [], []])  # one may be bad of three; each rank reads one
    for names, kind, message in ranks(2, try_a_bad_sample, folder):
        assert (names, kind) == (["zero-shot"], "DataError")
        first, second = [line for line in message.splitlines() if line.startswith("evaluation ")]
        assert first.startswith("evaluation 'retrieval': ")
        assert second.startswith("evaluation 'again': ")
        assert message.count("000000001: the caption (.txt) is empty") == 2


def evaluate_spoilt(folder, fraction):
    model = CLIP.from_pretrained(folder / "model")
    # In batches of two there is one without a single good image.
    spoilt = [task.model_copy(update={"max_bad_fraction": fraction}) for task in tasks(folder, batch_size=2)]
    try:
        return [result.to_json() for result in evaluate(model, spoilt)]
    except DataError as error:
        return type(error).__name__, str(error)


def test_unusable_images_are_left_out_named_and_counted(ranks, folder, caplog):
    """All but one of rank 1's captioned images are bad; what no rank has too much of, all have together."""
    caption_shards(folder / "captions", CAPTIONS, damaged=(0, 1, 4))
    class_shards(folder / "classes", damaged=[3])
    ((labelled, pairs), failed), *others = ranks(3, for_each, evaluate_spoilt, [(folder, 0.34), (folder, 0.23)])
    assert all(other == [[labelled, pairs], failed] for other in others)
    name, message = failed  # two of nine are allowed
    assert name == "DataError"
    assert "3 samples cannot be used; max_bad_fraction of an evaluation (--bad-fraction of" in message
    assert "sample 000000000: not a JPEG" in message
    assert (labelled["samples"], pairs["samples"]) == (21, 6)
    assert labelled["notes"] == ["1 of 22 images cannot be used and are left out"]
    assert pairs["notes"] == ["3 of 9 images cannot be used and are left out"]
    assert pairs["captions"] == sum(len(lines) for i, lines in enumerate(CAPTIONS) if i not in (0, 1, 4))
    alone = evaluate_spoilt(folder, 0.34)
    for result, expected in zip((labelled, pairs), alone, strict=True):
        for mode in MODES:
            assert result["figures"][mode] == pytest.approx(expected["figures"][mode])
        assert result["usage"] == expected["usage"]
    assert "sample 4 left out" in caplog.text
    assert "00000.tar: sample 000000004: not a JPEG" in caplog.text


def stall(image):
    time.sleep(3)
    return image


@pytest.mark.slow
def test_a_stuck_worker_does_not_hang(folder):
    model = PlainModel(12)
    model.image.transform = stall
    for task in tasks(folder, limit=1):
        with pytest.raises(DataError, match="no batch came from the data workers for 1 s"):
            evaluate(model, [task.model_copy(update={"workers": 1, "timeout_s": 1.0})])


def test_prepare_finds_what_evaluate_would_and_names_must_differ(folder):
    schema, (zero_shot, retrieval) = TypeAdapter(Evaluations), tasks(folder)
    same_name = retrieval.model_copy(update={"name": zero_shot.name})
    assert schema.validate_python((zero_shot, same_name)) == (zero_shot, same_name)
    with pytest.raises(ValidationError, match="two of kind 'zero_shot' named 'zero-shot'"):
        schema.validate_python((zero_shot, zero_shot))
    prepare(tasks(folder))
    (folder / "classes" / "classnames.txt").unlink()
    with pytest.raises(DataError, match=r"^evaluation\[0\].data: .*classnames\.txt"):
        prepare(tasks(folder))


def test_batch_sizes_and_workers_change_nothing_and_codes_are_kept_where_asked(folder):
    model = tiny_clip()
    one = evaluate(model, tasks(folder, batch_size=1), codes_folder=folder / "codes" / "here")
    names = sorted(path.name for path in (folder / "codes" / "here").iterdir())
    assert names == [f"{task}-{modality}-0.safetensors" for task in (0, 1) for modality in ("image", "text")]
    ids = load_ids(folder / "codes" / "here" / "1-text-0.safetensors", model.text.codebook_sizes)
    assert ids.shape == (sum(map(len, CAPTIONS)), 12, 1)
    other = evaluate(model, [task.model_copy(update={"workers": 2}) for task in tasks(folder, batch_size=100)])
    for a, b in zip(one, other, strict=True):
        assert a.figures["codes_only"] == pytest.approx(b.figures["codes_only"])
        assert a.usage == b.usage


# Tables and JSON.


def results():
    image = code_usage([torch.tensor([3, 1]), torch.tensor([4])], (8, 4), samples=2)
    text = code_usage([torch.tensor([1, 1])], (1000,), samples=1)
    zero_shot = Result(
        name="scenes test",
        kind="zero_shot",
        figures={mode: {"top1": 0.931, "top5": 1.0} for mode in ("continuous", "quantized", "codes_only")},
        chance={"top1": 1 / 99, "top5": 5 / 99},
        samples=1980,
        classes=99,
        captions=693,
        usage={"image": image, "text": text},
    )
    retrieval = Result(
        name="val",
        kind="retrieval",
        figures={"continuous": {"i2t_r1": 0.054}, "quantized": {"i2t_r1": 0.0}, "codes_only": None},
        chance={"i2t_r1": 0.0025},
        samples=400,
        classes=None,
        captions=400,
        usage={"image": None, "text": None},
        notes=["no codes-only figures: no codebook"],
    )
    return [zero_shot, retrieval]


TABLE = """\
%                    continuous  quantized  codes only  chance
-------------------  ----------  ---------  ----------  ------
scenes test (1,980 images, 99 classes)
  top-1                    93.1       93.1        93.1    1.01
  top-5                   100.0      100.0       100.0    5.05
val (400 images, 400 captions)
  image to text R@1         5.4        0.0           -    0.25

codes    samples  tokens  used, %  perplexity  bits/token used  bits/sample
-------  -------  ------  -------  ----------  ---------------  -----------
scenes test
  image        2       4     25.0         1.4     0.81 of 5.00           10
  text         1       2      0.2         2.0     1.00 of 9.97           20

val: no codes-only figures: no codebook"""


def test_the_table_is_aligned_with_chance_and_notes():
    assert format_results(results()) == TABLE


def test_class_names_cannot_steer_a_terminal_or_leave_their_line():
    result = dataclasses.replace(results()[0], name="\x1b[2Jx", notes=["names: \u202egod\n```\n<script>, a\x85b"])
    text = format_results([result])
    assert text.replace("\n", "").isprintable()
    assert text.splitlines()[-1] == r"\x1b[2Jx: names: \u202egod\n```\n<script>, a\x85b"
    assert not any(line.startswith("```") for line in text.splitlines())


def test_scalars_have_their_units_and_leave_out_what_is_missing():
    zero_shot, retrieval = results()
    assert zero_shot.scalars()["scenes test/codes_only/top1"] == 0.931
    assert retrieval.scalars() == {"val/continuous/i2t_r1": 0.054, "val/quantized/i2t_r1": 0.0}
    assert format_figure("eval/unseen/codes_only/top1", 0.975) == "97.5%"
    assert format_figure("unseen/codes_only/psnr", 21.698) == "21.70 dB"
    assert format_figure("psnr_of_mse", 0.5) == "0.50 dB"
    assert format_figure("ssim", 0.9123) == "0.912"
