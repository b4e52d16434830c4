from __future__ import annotations

import dataclasses
import json

import torch

from vqclip.evaluation import Result, format_figure, format_results, write_json
from vqclip.evaluation.encode import code_usage
from vqclip.evaluation.tables import table


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


def test_json_holds_all_of_it(tmp_path):
    write_json(tmp_path / "new" / "results.json", results())
    zero_shot, retrieval = json.loads((tmp_path / "new" / "results.json").read_text())
    assert zero_shot["figures"]["codes_only"]["top1"] == 0.931
    assert zero_shot["usage"]["image"]["codebook_sizes"] == [8, 4]
    assert retrieval["figures"]["codes_only"] is None


def test_scalars_leave_out_what_is_missing():
    zero_shot, retrieval = results()
    assert zero_shot.scalars()["scenes test/codes_only/top1"] == 0.931
    assert retrieval.scalars() == {"val/continuous/i2t_r1": 0.054, "val/quantized/i2t_r1": 0.0}


def test_class_names_cannot_steer_a_terminal_or_leave_their_line():
    result = dataclasses.replace(results()[0], name="\x1b[2Jx", notes=["names: \u202egod\n```\n<script>, a\x85b"])
    text = format_results([result])
    assert text.replace("\n", "").isprintable()
    assert text.splitlines()[-1] == r"\x1b[2Jx: names: \u202egod\n```\n<script>, a\x85b"
    assert not any(line.startswith("```") for line in text.splitlines())


def test_figures_have_their_units():
    assert format_figure("eval/unseen/codes_only/top1", 0.975) == "97.5%"
    assert format_figure("unseen/codes_only/psnr", 21.698) == "21.70 dB"
    assert format_figure("psnr_of_mse", 0.5) == "0.50 dB"
    assert format_figure("ssim", 0.9123) == "0.912"


def test_the_heads_of_a_wide_table_are_broken():
    heads = ("stored as", "bits/image", "PSNR of the mean error (dB)", *["perceptual distance"] * 3)
    lines = table(heads, [("codes, first 2 of 4", "3072", *["0.1"] * 4)], left=1).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0].strip() for line in lines] == ["", "", "stored as", "-" * 19, "codes, first 2 of 4"]
    assert lines[1].split() == ["the", "mean", *["perceptual"] * 3]
    assert lines[2].split() == ["stored", "as", "bits/image", "error", "(dB)", *["distance"] * 3]
