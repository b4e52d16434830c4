"""clip_benchmark's own command gives the figures of `vqclip evaluate`."""

import io
import json
import pickle
import sys

import pytest
import torch
from PIL import Image
from webdataset import autodecode

from tests.data.hostile import marking_pickle
from tests.data.making import encode, write_tar
from tests.evaluation.made import caption_tar, colour_of, name_classes, noisy, png
from vqclip.cli.main import main
from vqclip.evaluation import MODES
from vqclip.integrations.clip_benchmark import load_vqclip

CLASSES = ("red", "green", "blue", "white", "a dark colour", "none of these", "x", "many small dots", "7")


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Labelled images in two shards, some transparent; beside the first is a pickle that makes the folder ``ran``."""
    folder = tmp_path_factory.mktemp("classes")
    for shard in range(2):
        members = {}
        for i in range(20 * shard, 20 * shard + 20):
            image = png(colour_of(i % 4), seed=i)
            members |= {f"{i:05d}.png": transparent(image) if i % 3 else image, f"{i:05d}.cls": str(i * 5 % 9).encode()}
            members |= {f"{i:05d}.pkl": marking_pickle(folder / "ran")} if i == 0 else {}
        write_tar(folder / "test" / f"{shard}.tar", members)
    (folder / "test" / "nshards.txt").write_text("2")
    return name_classes(folder, CLASSES, ("a {c} picture", "{c}"))


def transparent(image):
    opened = Image.open(io.BytesIO(image))
    opened.putalpha(Image.linear_gradient("L").resize(opened.size))
    return encode(opened, "PNG")


def theirs(model, data, out, *options):
    arguments = ["clip-benchmark", "eval", "--pretrained", str(model), "--model", *MODES, "--quiet"]
    arguments += ["--dataset", "wds/made", "--dataset_root", str(data), "--output", str(out / "{model}.json"), *options]
    assert main(arguments) == 0
    return {mode: json.loads((out / f"{mode}.json").read_text())["metrics"] for mode in MODES}


def ours(out, *arguments):
    assert main(["evaluate", *map(str, arguments), "--json", str(out / "ours.json")]) == 0
    return json.loads((out / "ours.json").read_text())[0]["figures"]


def test_classification(run, classes, tmp_path):
    found = theirs(run, classes, tmp_path / "out", "--batch_size", "7")
    expected = ours(tmp_path, "zero-shot", run, "--data", classes)
    for mode in MODES:
        figures = expected[mode]
        assert (found[mode]["acc1"], found[mode]["acc5"]) == (figures["top1"], figures["top5"])
        assert found[mode]["mean_per_class_recall"] == pytest.approx(figures["mean_per_class"], abs=1e-15)
    assert 0 < expected["codes_only"]["top1"] < expected["codes_only"]["top5"] < 1
    assert expected["codes_only"] == expected["quantized"] != expected["continuous"]
    assert not (classes / "ran").exists()
    assert autodecode.imagespecs["pil"][2] == "rgb"
    autodecode.decoders["pkl"](marking_pickle(classes / "ran"))
    assert (classes / "ran").exists()  # so it would have been made


def test_workers_adapt_webdataset(run, monkeypatch):
    for table in ("decoders", "imagespecs"):
        monkeypatch.setattr(autodecode, table, dict(getattr(autodecode, table)))
    clip, preprocess, tokenizer = load_vqclip("quantized", str(run), precision="bf16")
    assert (clip.mode, clip.precision, preprocess.dtype) == ("quantized", "bf16", torch.uint8)  # pixels stay bytes
    assert tokenizer.context_length == 12
    assert "pkl" in autodecode.decoders
    assert pickle.loads(pickle.dumps(preprocess)).transform.size == 16
    assert "pkl" not in autodecode.decoders
    assert autodecode.imagespecs["pil"][2] == "rgba"


def test_retrieval_with_several_captions(run, tmp_path):
    captions = [[f"{i} {CLASSES[i % 5]} things", f"number {i * i}", f"{i}"][: 1 + i % 3] for i in range(30)]
    caption_tar(tmp_path / "data" / "val" / "0.tar", noisy(30), captions)
    (tmp_path / "data" / "val" / "nshards.txt").write_text("1")
    (tmp_path / "data" / "dataset_type.txt").write_text("retrieval\n")
    options = ("--split", "val", "--task", "zeroshot_retrieval", "--recall_k", "1", "5", "10")
    found = theirs(run, tmp_path / "data", tmp_path / "out", *options)
    expected = ours(tmp_path, "retrieval", run, "--data", tmp_path / "data" / "val", "captions=txt_lines")
    names = {"text_retrieval_recall@": "i2t_r", "image_retrieval_recall@": "t2i_r"}
    for mode in MODES:
        rates = {our + str(k): found[mode][f"{their}{k}"] for their, our in names.items() for k in (1, 5, 10)}
        assert rates == {key: torch.tensor(rate).item() for key, rate in expected[mode].items()}  # theirs are float32
    assert 0 < expected["codes_only"]["i2t_r1"] < expected["codes_only"]["i2t_r10"] < 1


def test_wrong_options(run, tmp_path, refused):
    data = ("--dataset", "wds/made", "--dataset_root", str(tmp_path / "none"))
    for arguments, message in [
        ([], "pretrained: missing; expected a list"),
        (["--pretrained", str(run), "--amp"], "--amp: expected --precision bf16 or fp16"),
        (["--pretrained", str(run), "--pretrained_model=a,b"], "--pretrained_model: expected --pretrained"),
        (["--pretrained", str(run), "--task", "captioning"], "which needs a model that writes text"),
        (["--pretrained", str(run), "--output", "x.json"], "expected {model} in it"),
        (["--pretrained", str(run), str(run), "--output", "{model}"], "expected {pretrained} in it"),
        (["--pretrained", str(tmp_path / "gone"), *data], "no such run, checkpoint or tokenizer folder here"),
        (["--pretrained", str(run), *data, "--model_cache_dir", "x"], "HF_HOME sets it"),
        (["--pretrained", str(run), *data], "none/test/nshards.txt: no such file, which clip_benchmark reads; exp"),
    ]:
        assert message in refused(main(["clip-benchmark", "eval", *arguments, "--quiet"]))
    if not torch.cuda.is_available():
        found = refused(main(["clip-benchmark", "eval", "--pretrained", str(run), "--task", "linear_probe"]))
        assert "clip_benchmark needs a GPU" in found


def test_without_the_extra(run, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "clip_benchmark", None)
    for name in [name for name in sys.modules if name.startswith("clip_benchmark.")]:
        monkeypatch.delitem(sys.modules, name)
    found = refused(main(["clip-benchmark", "eval", "--pretrained", str(run)]))
    assert "pip install 'vqclip[clip-benchmark]'" in found
    assert main(["clip-benchmark", "build", "x.json"]) == 2


def test_build_refuses_other_files(tmp_path, refused):
    for content in ('{"samples": 3}', "filepath,title"):
        (tmp_path / "report.json").write_text(content)
        arguments = [str(tmp_path / "report.json"), "--output", str(tmp_path / "b.csv")]
        assert "expected results of eval" in refused(main(["clip-benchmark", "build", *arguments]))
