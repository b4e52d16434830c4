"""The training command as a user meets it."""

import errno
import functools
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import vqclip
from tests.commands import command
from tests.data.making import NOT_UTF8, caption_shards, encode, pixels, write_tar
from tests.models import FSQ, LFQ
from tests.training import (
    all_equal,
    before_steps,
    error_of,
    largest_difference,
    metrics,
    retrieval,
    run,
    run_compiled,
    run_tree,
    timeless,
    weights,
)
from vqclip import dist
from vqclip.cli.options import make_parser
from vqclip.cli.train import Train
from vqclip.config import load_config
from vqclip.data import TrainData, loader, prepare
from vqclip.data.samples import SampleMaker
from vqclip.errors import ConfigError, DataError, NonFiniteError, OtherRunError
from vqclip.evaluation import RetrievalConfig, evaluate, try_all
from vqclip.losses.tiled import tiled_loss
from vqclip.model import CLIP
from vqclip.runlog.metrics import read_metrics
from vqclip.towers.image import TimmTowerConfig
from vqclip.train import TrainConfig
from vqclip.train import run as train
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.config import ScheduleConfig
from vqclip.train.export import export_tokenizer
from vqclip.train.main import require_samples
from vqclip.train.parallel import CompiledRegions
from vqclip.train.resume import Resumed
from vqclip.train.step import TrainStep
from vqclip.train.summary import render
from vqclip.train.tasks.kinds import TASKS

tokenize_command = command("tokenize")
main = command("train")


def write_config(path, tree):
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


def test_a_run_leaves_everything_a_user_needs(tmp_path, shards, capsys):
    tree = run_tree(
        tmp_path / "runs", shards, train__steps=6, train__precision="fp32", train__evaluate_every=3,
        evaluation=retrieval(shards),
    )  # fmt: skip
    assert main(["--config", str(write_config(tmp_path / "run.yaml", tree))]) == 0
    printed = capsys.readouterr()
    folder = tmp_path / "runs" / "tiny"
    for text in ("72 samples shown in 2.40 epochs: 30 of 30", "codes only", "chance", "bits", f"{folder}/tokenizer"):
        assert text in printed.out
    assert "30 of 30 at least once" in (folder / "train.log").read_text()
    for name in ("config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "tokenizer", "summary.json"):
        assert (folder / name).exists()
    assert load_config(TrainConfig, folder / "config.yaml").train.steps == 6
    lines = metrics(tmp_path / "runs")
    assert [line["step"] for line in lines if "loss/total" in line] == [1, 2, 3, 4, 5, 6]
    names = {"loss/contrastive", "grad_norm", "lr", "temperature/scale", "image/usage", "text/perplexity"}
    assert names <= lines[0].keys()
    assert any("eval/pairs/codes_only/i2t_r1" in line for line in lines)

    summary = json.loads((folder / "summary.json").read_text())
    figures = summary["results"][0]["figures"]
    assert figures["quantized"] == figures["codes_only"]
    trained = CLIP.from_pretrained(folder / "checkpoints" / "step-00000006" / "model")
    exported = vqclip.load_tokenizer(folder / "tokenizer", modality="text")
    assert torch.equal(exported.encode(["caption 3"]), trained.text.encode(["caption 3"]))
    assert "load_tokenizer" in (folder / "tokenizer" / "README.md").read_text()


def test_an_export_keeps_what_others_added_and_skips_what_cannot_be_copied(tmp_path, monkeypatch, caplog):
    task = mock.Mock(export=lambda folder: (folder / "config.json").write_text("new"))
    for name in ("config.json", "notes/a", "unreadable"):
        (tmp_path / "tokenizer" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "tokenizer" / name).write_text("old")
    (tmp_path / "tokenizer" / ".#README.md").symlink_to("me@host.1")
    copyfile = shutil.copyfile

    def fail(source, target, **options):
        if source.name == "unreadable":
            raise PermissionError(13, "Permission denied", str(source))
        return copyfile(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", fail)
    export_tokenizer(task, tmp_path / "tokenizer")
    found = {path.name: path.is_symlink() or path.is_dir() or path.read_text() for path in tmp_path.rglob("*")}
    assert found == {"tokenizer": True, "config.json": "new", "notes": True, "a": "old", ".#README.md": True}
    assert "unreadable cannot be copied" in caplog.text


def test_names_of_any_bytes(tmp_path, monkeypatch, capsys):
    """Of every folder on the way, the cache's included, of classes and images; also in figures, trackers and pages."""
    home = tmp_path / NOT_UTF8
    monkeypatch.setenv("VQCLIP_CACHE", str(home / "cache"))
    for number in range(12):
        image = home / "classes" / os.fsdecode(b"%d\xe9" % (number % 2)) / os.fsdecode(b"%d\xff.jpg" % number)
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(encode(pixels(number)))
    source = {"kind": "folder", "path": str(home / "classes")}
    zero_shot = [{"kind": "zero_shot", "name": "classes", "data": source}]
    tree = run_tree(
        home, tmp_path, data__sources=[source], evaluation=zero_shot, train__steps=4, train__precision="fp32",
        train__report_every=2, data__feature_cache={}, data__views=1, optim__lr=1e-3, optim__warmup_steps=1,
        model__image__tower__train="none",
    )  # fmt: skip
    config = str(write_config(tmp_path / "run.yaml", tree))
    assert main(["--config", config]) == 0, capsys.readouterr().err
    assert "0é" in (home / "tiny" / "report.html").read_text("utf-8")
    assert list((home / "tiny" / "tensorboard").iterdir())
    (home / "tiny" / "summary.json").unlink()
    written = str(home / "tiny" / "config.yaml")
    assert main(["--config", written, f"data.sources[0].path={json.dumps(source['path'])}"]) == 0  # resumes
    assert "Traceback" not in capsys.readouterr().err


def test_mistakes_are_lines_and_status_2(tmp_path, shards, refused):
    tree = run_tree(tmp_path, shards)
    tree["optim"]["learning_rate"] = 1e-3
    tree["train"]["steps"] = "many"
    tree["model"]["image"]["quantizer"] = {"kind": "fsqq"}
    config = write_config(tmp_path / "run.yaml", tree)
    error = refused(main(["--config", str(config)]))
    assert error.endswith('optim.learning_rate: unknown key; did you mean "lr"?\n')
    assert error.count("\n") == 1
    del tree["optim"]["learning_rate"]
    error = refused(main(["--config", str(write_config(config, tree))]))
    lines = [line for line in error.splitlines() if str(config) in line]
    assert len(lines) == 2
    for expected in ("train.steps", "model.image.quantizer.kind"):
        assert sum(expected in line for line in lines) == 1
    assert 'did you mean "fsq"' in error
    assert "Traceback" not in error


def test_the_schema_has_every_task(capsys):
    assert main(["--json-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    tasks = [schema["$defs"][each["$ref"].rpartition("/")[2]] for each in schema["anyOf"]]
    assert [{"optim", "train"} <= task["properties"].keys() for task in tasks] == [True] * len(TASKS)


def test_no_option_can_be_taken_for_one_of_torchruns():
    """torchrun expands prefixes: `--log...` would become its `--log-dir`."""
    from torch.distributed.run import get_args_parser

    theirs, ours = (
        {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        for parser in (get_args_parser(), make_parser("train", Train))
    )
    assert {"--config", "--print-config"} <= ours
    for option in ours:
        assert [their for their in theirs if their.startswith(option) or option.startswith(their + "-")] == []


def test_loss_and_temperature_must_fit(tmp_path, shards):
    with pytest.raises(ValueError, match="needs model.temperature.bias"):
        TrainConfig.model_validate(run_tree(tmp_path, shards, loss={"kind": "sigmoid"}))
    with pytest.raises(ValueError, match="does not use model.temperature.bias"):
        TrainConfig.model_validate(run_tree(tmp_path, shards, model__temperature={"bias": -10.0}))


def test_a_bad_sample_is_named_replaced_and_counted_over_all_ranks(tmp_path, caplog, ranks):
    folder = caption_shards(tmp_path / "data", counts=(29,))
    write_tar(folder / "00001.tar", {"000000099.jpg": b"\xff\xd8\xff no image", "000000099.txt": b"x"})
    with caplog.at_level("WARNING"):
        summary = train(run_tree(tmp_path, folder, train__steps=5)).summary  # two epochs
    found = re.findall(r"step (\d): sample 29 replaced by (\d+): .*00001\.tar.*000000099", caplog.text)
    assert len(found) == 1  # once, not in each epoch
    written = list(read_metrics(tmp_path / "tiny" / "bad_samples.jsonl"))
    assert len(written) == 2
    assert all(bad["substitute_id"] != 29 for bad in written)
    assert (written[0]["step"] - 1, written[0]["substitute_id"]) == tuple(map(int, found[0]))
    counts = [line["data/replaced"] for line in metrics(tmp_path)]
    assert counts == [sum(bad["step"] <= done for bad in written) for done in (1, 2, 3, 4, 5)]
    assert summary.replaced == 2
    assert "2 times a bad one was replaced" in render(summary)
    again = train(run_tree(tmp_path, folder, train__steps=5))
    assert again.summary.replaced == 2  # it is the whole run's, not that of this process
    assert list(read_metrics(tmp_path / "tiny" / "bad_samples.jsonl")) == written
    assert all(re.search(r"00001\.tar: sample 000000099: ", bad["reason"]) for bad in written)
    assert {bad["sample_id"] for bad in written} == {29}
    (kind,) = {bad["kind"] for bad in written}
    assert metrics(tmp_path)[-1][f"data/replaced/{kind.replace(' ', '_')}"] == 2

    two = run_tree(tmp_path / "two", folder, train__steps=5)
    assert [each.summary.replaced for each in ranks(2, train, two, init=False)] == [2, 2]
    assert metrics(tmp_path / "two")[-1]["data/replaced"] == 2
    found = read_metrics(tmp_path / "two" / "tiny" / "bad_samples.jsonl")
    assert [bad["sample_id"] for bad in found] == [29, 29]


def test_captions_that_are_cut_are_told_once_and_counted_exactly(tmp_path, ranks, shards, caplog, capsys):
    """Of "caption 0" to "caption 29" those of two digits have five tokens."""
    changes = {"train__steps": 10, "train__report_every": 4, "model__text__tower__context_length": 4}
    changes |= {"evaluation": retrieval(shards)}
    with caplog.at_level("WARNING"):
        summary = train(run_tree(tmp_path / "one", shards, **changes)).summary
    found = "66.7 % of captions (80 of 120) are longer than model.text.tower.context_length 4 and were cut; "
    assert summary.captions == {
        "shown": 120, "cut": 80, "context_length": 4, "holds_95": 5, "holds_99": 5,
        "told": found + "5 would hold 100 % of them",
    }  # fmt: skip
    assert len([line for line in caplog.messages if "context_length 4 and were cut" in line]) == 1
    assert f"  captions    {found}" in render(summary)
    assert "pairs: 66.7 % of captions (20 of 30) are longer than the text tower's context_length 4" in render(summary)
    assert json.loads((tmp_path / "one" / "tiny" / "summary.json").read_text())["captions"]["cut"] == 80

    two = run_tree(tmp_path / "two", shards, **changes)
    assert [each.summary.captions for each in ranks(2, train, two, init=False)] == [summary.captions] * 2
    parts = run_tree(tmp_path / "parts", shards, **(changes | {"train__steps": 7}))
    train(parts)
    parts["train"]["steps"], parts["run"]["resume_allow"] = 10, ["train.steps"]
    assert train(parts).summary.captions == summary.captions

    tokenizer = tmp_path / "one" / "tiny" / "tokenizer"
    with pytest.warns(UserWarning, match="captions longer than 4 tokens, the text tower's context_length, are cut"):
        vqclip.load_tokenizer(tokenizer, modality="text").encode(["caption 3", "caption 13"])
    options = ["--tokenizer", str(tokenizer), "--data", str(shards), "--out", str(tmp_path / "tokens")]
    options += ["--device", "cpu", "--precision", "fp32"]
    assert tokenize_command(options) == 0
    said = capsys.readouterr().out
    assert said.count("66.7 % of captions (20 of 30) are longer than the text tower's context_length 4") == 1


def test_bad_samples_are_judged_over_a_resume(tmp_path, monkeypatch, shards):
    resumed = Resumed(0, {"replaced": {"no caption": 11}}, None)  # none is added, and 10 in a thousand may be bad
    monkeypatch.setattr("vqclip.train.main.resume", lambda *args: resumed)
    with pytest.raises(DataError, match="11 bad samples among 12: more than data.max_bad_fraction=0.01 allows"):
        train(run_tree(tmp_path, shards, train__steps=4))


def too_many_bad_ones(tree):
    """Rank 1 alone meets bad samples, and reports are far away: what it raised, and how many steps it began."""
    make, steps = SampleMaker._make, []

    def bad_here(self, source, index, epoch):
        if dist.rank() == 1 and index % 2 == 0:
            raise DataError(f"sample {index} is bad here", "damaged image")
        return make(self, source, index, epoch)

    with (
        mock.patch.object(loader, "SMALL", 10),
        mock.patch.object(SampleMaker, "_make", bad_here),
        before_steps(lambda step, batch, number: steps.append(number)),
        pytest.raises(DataError) as error,
    ):
        train(tree)
    return str(error.value), len(steps)


def test_too_many_bad_samples_of_one_rank_stop_all_alike_and_are_written_down(tmp_path, shards, ranks):
    tree = run_tree(tmp_path, shards, train__report_every=1000, data__max_bad_fraction=0.1)
    one, other = ranks(2, too_many_bad_ones, tree, init=False)
    assert one == other
    message, steps = one
    assert re.match(rf"\d+ bad samples among {12 * steps}: more than data.max_bad_fraction=0.1 allows", message)
    assert "is bad here" in message
    lines = list(read_metrics(tmp_path / "tiny" / "bad_samples.jsonl"))
    assert len(lines) == int(message.split()[0])
    assert {line["step"] for line in lines} <= set(range(1, steps + 1))
    assert lines[-1]["reason"] in message
    assert not (tmp_path / "tiny" / "checkpoints").exists()


def work_alone_on_rank_0(tree):
    """Rank 0 evaluates and runs training-mode forwards between two steps while rank 1 goes on."""

    def work(step, batch, number):
        if dist.rank() == 0 and number in (0, 1, 3):
            tasks = TrainConfig.model_validate(tree).evaluation
            results = evaluate(step.model, tasks, distributed=False)
            assert results[0].samples == 30
            step.model.train()
            out = step.model(batch.images, batch.texts)  # in training mode, with gradients, alone
            out.image.embedding.sum().backward()
            with torch.no_grad():
                step.model(batch.images, batch.texts)

    with before_steps(work):
        return train(tree).finished


def test_rank_0_works_alone_in_a_job_of_two(tmp_path, shards, ranks):
    tree = run_tree(tmp_path, shards, train__steps=6, evaluation=retrieval(shards))
    assert ranks(2, work_alone_on_rank_0, tree, init=False, timeout=90.0) == [True, True]


def test_bf16_is_for_the_towers_alone(tmp_path, shards, monkeypatch):
    seen = {}

    def watch(name, module, dtype=lambda inputs, output: output.dtype):
        module.register_forward_hook(lambda module, inputs, output: seen.update({name: dtype(inputs, output)}))

    def watch_step(step, batch, number):
        for modality in ("image", "text"):
            tokenizer = getattr(step.model, modality)
            layers = [module for module in tokenizer.tower.modules() if isinstance(module, nn.Linear)]
            watch(f"{modality} tower", layers[-1])
            watch(f"{modality} codes", tokenizer.quantizer, lambda inputs, output: output.vectors.dtype)
        watch("features", step.task.loss, lambda inputs, output: {each.dtype for each in inputs[:2]})

    def loss_of(kind, impl, image, text, *others, **keys):
        seen["logits"] = (image[:0] @ text[:0].T).dtype
        return tiled_loss(kind, impl, image, text, *others, **keys)

    monkeypatch.setattr("vqclip.losses.contrastive.tiled_loss", loss_of)
    with before_steps(watch_step):
        train(run_tree(tmp_path, shards, train__steps=4, train__precision="bf16"))
    half, full = torch.bfloat16, torch.float32
    assert seen == {
        "image tower": half, "text tower": half, "image codes": full, "text codes": full,
        "features": {full}, "logits": full,
    }  # fmt: skip
    assert {tensor.dtype for tensor in weights(tmp_path, 4).values() if tensor.is_floating_point()} == {full}


def test_activation_checkpointing_changes_nothing(tmp_path, shards):
    for value in (False, True, 2):
        changes = {"train__activation_checkpointing": value, "train__micro_batches": 2}
        train(run_tree(tmp_path / str(value), shards, train__steps=4, **changes))
        assert all_equal(weights(tmp_path / "False", 4), weights(tmp_path / str(value), 4)), value


def overflowing(steps):
    step = TrainStep.__call__

    def call(self, batch, number):
        hook = None
        if number in steps:
            hook = self.model.text.project_out[0].weight.register_hook(lambda gradient: gradient * float("inf"))
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        try:
            return step(self, batch, number)
        finally:
            if hook is not None:
                hook.remove()
                assert all(torch.equal(before[name], value) for name, value in self.model.state_dict().items())

    return call


def test_fp16_skips_and_counts_a_step_that_overflows(tmp_path, shards, monkeypatch):
    """Over a resume, too."""
    monkeypatch.setattr(TrainStep, "__call__", overflowing({13}))
    tree = run_tree(tmp_path, shards, train__steps=16, train__precision="fp16", train__checkpoint_every=14)
    train(tree)
    lines = metrics(tmp_path)
    later = lines[12:]  # until then the scale comes down to what this model bears
    assert [line["fp16/skipped_steps"] - later[0]["fp16/skipped_steps"] for line in later] == [0, 1, 1, 1]
    scale = later[0]["fp16/scale"]
    assert [line["fp16/scale"] for line in later] == [scale, scale / 2, scale / 2, scale / 2]
    assert later[-1]["loss/total"] < lines[0]["loss/total"]
    shutil.rmtree(tmp_path / "tiny" / "checkpoints" / "step-00000016")
    train(tree)
    assert [line["fp16/skipped_steps"] for line in metrics(tmp_path)] == [line["fp16/skipped_steps"] for line in lines]


def test_fp16_stops_when_no_scale_helps(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(TrainStep, "__call__", overflowing(range(2, 99)))
    tree = run_tree(tmp_path, shards, train__steps=60, train__precision="fp16")
    with pytest.raises(NonFiniteError, match="not finite even with the loss scaled by 1, after 17 skipped"):
        train(tree)


@pytest.mark.parametrize("mode", [True, "regional"])
def test_a_machine_without_a_compiler_is_refused_before_the_first_step(tmp_path, shards, monkeypatch, mode):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    tree = run_tree(tmp_path, shards, train__compile=mode)
    with pytest.raises(ConfigError, match="^train.compile: torch.compile needs a C.. compiler, .* no .*; install g"):
        train(tree)


GRAPHS = {True: 1, "regional": 4}
"""The model, or one for the blocks of each tower and one for each quantizer."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("quantizer", "world_size", "mode", "backend"),
    [
        *((FSQ, 1, True, "aot_eager"), (LFQ, 2, True, "aot_eager")),
        *((LFQ, 1, "regional", "aot_eager"), (FSQ, 2, "regional", "aot_eager")),
        *((FSQ, 1, True, "inductor"), (FSQ, 2, True, "inductor"), (FSQ, 1, "regional", "inductor")),
    ],
)
def test_compiled_equals_eager(tmp_path, shards, ranks, quantizer, world_size, mode, backend):
    """aot_eager traces all there is but generates no code, which is what takes its time."""
    trees = [
        run_tree(tmp_path / name, shards, quantizer, train__steps=4, train__compile=compile, run__timeout_s=600.0)
        for name, compile in (("eager", False), ("compiled", mode))
    ]
    ranks(world_size, run, trees[0], init=False)
    for graphs, breaks in ranks(world_size, run_compiled, trees[1], backend, init=False, timeout=800.0):
        assert (graphs, breaks) == (GRAPHS[mode], 0)
    losses = [[line["loss/total"] for line in metrics(tmp_path / name)] for name in ("eager", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert largest_difference(weights(tmp_path / "eager", 4), weights(tmp_path / "compiled", 4)) < 1e-6


@pytest.mark.slow
def test_compiled_regions_are_recomputed_and_never_evaluated(tmp_path, shards):
    """The bits of eager training with a backend that generates no code; as many graphs as without evaluation."""
    settings = {"train__steps": 4, "train__micro_batches": 2, "train__activation_checkpointing": 2}
    settings |= {"evaluation": retrieval(shards), "train__evaluate_every": 2}
    run(run_tree(tmp_path / "eager", shards, **settings))
    tree = run_tree(tmp_path / "compiled", shards, **settings, train__compile="regional")
    graphs, breaks = run_compiled(tree, "aot_eager")
    assert (graphs, breaks) == (8, 0)  # with and without gradients
    assert largest_difference(weights(tmp_path / "eager", 4), weights(tmp_path / "compiled", 4)) < 1e-9


@pytest.mark.slow
def test_every_rate_of_stochastic_depth_is_compiled():
    args = {"patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "drop_path_rate": 0.4}
    tower = TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=args).build()
    graphs = []
    compile = functools.partial(torch.compile, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    few = torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2)
    with few, mock.patch.object(torch, "compile", compile), CompiledRegions([tower], []).applied():
        tower(torch.rand(2, 3, 16, 16))
    assert len(graphs) == 4


def test_only_one_process_of_a_machine_tells_what_all_of_them_read(tmp_path, monkeypatch, capsys):
    """The others give it time to: torchrun ends all as soon as one has ended."""
    slept = []
    monkeypatch.setattr("vqclip.cli.train.time.sleep", slept.append)
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert main(["--config", str(tmp_path / "missing.yaml")]) == 2
        assert ("missing.yaml" in capsys.readouterr().err) == (rank == 0)
        assert slept == [5.0] * rank


def test_every_rank_tells_what_went_wrong_on_it(tmp_path, shards, monkeypatch, capsys):
    error = ConfigError("run.device: got 'cuda', but torch sees no GPU")
    monkeypatch.setattr("vqclip.train.run", mock.Mock(side_effect=error))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["--config", str(write_config(tmp_path / "run.yaml", run_tree(tmp_path, shards)))]) == 2
    assert "rank 1: run.device: got 'cuda'" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made_is_told_at_once(tmp_path, shards, capsys, monkeypatch):
    monkeypatch.setattr("vqclip.data.DataConfig.build", None)  # nothing else is tried
    (tmp_path / "file").touch()
    tree = run_tree(tmp_path / "file", shards)
    assert main(["--config", str(write_config(tmp_path / "run.yaml", tree))]) == 1
    error = capsys.readouterr().err
    assert f"run.folder: cannot make the run's folder {tmp_path}/file/tiny: Not a directory" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("failing", ["vqclip.train.main.write_text", "vqclip.runlog.metrics.JsonLines.write"])
def test_a_full_disk_is_one_line_and_status_1(tmp_path, shards, capsys, monkeypatch, failing):
    error = OSError(errno.ENOSPC, "No space left on device", "some file")
    monkeypatch.setattr(failing, mock.Mock(side_effect=error))
    assert main(["--config", str(write_config(tmp_path / "run.yaml", run_tree(tmp_path, shards)))]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "No space left on device" in line]
    assert line == "vqclip train: some file: No space left on device"


def test_a_finished_run_that_is_run_again_keeps_its_record(tmp_path, shards, caplog):
    caplog.set_level("INFO")
    tree = run_tree(tmp_path, shards, train__steps=4, evaluation=retrieval(shards), optim__warmup_steps=1)
    folder = tmp_path / "tiny"
    train(tree)
    (evaluated,) = [line for line in metrics(tmp_path) if "eval/pairs/codes_only/i2t_r1" in line]
    assert evaluated["step"] == 4
    before = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "summary.json", "tokenizer/README.md")}
    assert json.loads(before["summary.json"])["speed"]["images_per_second"] > 0
    assert "steps are done" not in caplog.text
    (folder / "tokenizer/onnx").mkdir()
    (folder / "tokenizer/onnx/LICENSE").write_text("of the user")
    train(tree)
    assert (folder / "tokenizer/onnx/LICENSE").read_text() == "of the user"
    assert "all 4 steps are done; evaluated again. run.name=... begins another run" in caplog.text
    assert before == {name: (folder / name).read_bytes() for name in before}
    assert [path.name for path in folder.glob(".*")] == [".run.lock"]
    tree["train"]["steps"] = 3
    with pytest.raises(OtherRunError, match="has done 4 steps, and this run asks for 3; expected more, or another run"):
        train(tree)


def test_the_speed_is_that_of_training_alone(tmp_path, shards, monkeypatch):
    """A step takes 1 s and waits 0.25 s for its data; saving and evaluation take 100 s each, between two reports."""
    now = 0.0

    def taking(seconds, function):
        def call(*args, **options):
            nonlocal now
            now += seconds
            return function(*args, **options)

        return call

    def slowly(batches):
        for batch in batches:
            taking(0.25, lambda: None)()
            yield batch

    batches = TrainData.batches
    monkeypatch.setattr("vqclip.train.speed.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(TrainData, "batches", lambda self, *args, **options: slowly(batches(self, *args, **options)))
    monkeypatch.setattr(TrainStep, "__call__", taking(0.75, TrainStep.__call__))
    monkeypatch.setattr(Checkpointer, "save", taking(100.0, Checkpointer.save))
    monkeypatch.setattr("vqclip.train.callbacks.builtin.try_all", taking(100.0, try_all))
    changes = {"train__steps": 12, "train__report_every": 4, "train__checkpoint_every": 6, "train__evaluate_every": 3}
    summary = train(run_tree(tmp_path, shards, **changes)).summary
    assert [line["images_per_second"] for line in metrics(tmp_path)] == [12.0] * 3
    assert summary.speed == {"images_per_second": 12.0, "data_wait": 0.25}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_data_worker_killed_during_a_step_is_explained(tmp_path, shards):
    def kill(step, batch, number):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        time.sleep(30)

    told = r"a data worker died.*killed for memory\? Fewer data.workers"
    with before_steps(kill), pytest.raises(DataError, match=told):
        train(run_tree(tmp_path, shards, data__workers=2))


def test_an_evaluation_that_fails_takes_nothing_from_the_others(tmp_path, shards, capsys, monkeypatch):
    run = RetrievalConfig.run

    def fail(self, model, encoder, name):
        if self.name == "broken":
            raise DataError("this shard is torn")
        return run(self, model, encoder, name)

    monkeypatch.setattr(RetrievalConfig, "run", fail)
    tasks = [{**retrieval(shards)[0], "name": name} for name in ("broken", "pairs")]
    tree = run_tree(tmp_path, shards, evaluation=tasks, train__steps=4)
    assert main(["--config", str(write_config(tmp_path / "run.yaml", tree))]) == 1
    printed = capsys.readouterr()
    assert "evaluation 'broken': this shard is torn" in printed.err
    assert "pairs (30 images" in printed.out
    (line,) = [line for line in metrics(tmp_path) if "eval/pairs/codes_only/i2t_r1" in line]
    assert line["step"] == 4
    assert weights(tmp_path, 4)  # saved before
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert [result["name"] for result in summary["results"]] == ["pairs"]


def test_an_interrupt_pressed_twice_is_one_line(tmp_path, shards, capsys, monkeypatch, interruptible):
    def interrupt(*args, **options):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr("vqclip.train.main.prepare", interrupt)
    assert main(["--config", str(write_config(tmp_path / "run.yaml", run_tree(tmp_path, shards)))]) == 130
    assert [line for line in capsys.readouterr().err.splitlines() if "interrupted" in line] == [
        "vqclip train: interrupted; what is not in a checkpoint is not kept"
    ]
    assert not (tmp_path / "tiny" / "stopped.json").exists()


def while_indexing(monkeypatch, number):
    """In the first of two shards; the second is not read any more."""
    index, read = prepare.prepare_shard, []

    def signalled(path):
        read.append(path)
        assert len(read) == 1
        os.kill(os.getpid(), number)
        return index(path)

    monkeypatch.setattr(prepare, "prepare_shard", signalled)


def while_building(monkeypatch, number):
    monkeypatch.setattr("vqclip.train.tasks.contrastive.towers_draw", lambda _: os.kill(os.getpid(), number))


@pytest.mark.parametrize(("when", "number"), [(while_indexing, signal.SIGUSR1), (while_building, signal.SIGINT)])
@pytest.mark.usefixtures("interruptible")
def test_a_signal_during_the_start_leaves_a_marker(tmp_path, shards, monkeypatch, when, number, capsys):
    config = write_config(tmp_path / "run.yaml", run_tree(tmp_path, shards, train__steps=4))
    marker = tmp_path / "tiny" / "stopped.json"
    with monkeypatch.context() as patch:
        when(patch, number)
        assert main(["--config", str(config)]) == (130 if number == signal.SIGINT else 0)
    facts = json.loads(marker.read_text())
    assert (facts["step"], facts["steps"], facts["signal"], facts["checkpoint"]) == (0, 4, number.name, None)
    assert "stopped after step 0 of 4" in (out := capsys.readouterr().out)
    assert out.endswith(f"\n  vqclip train --config {config}\n")
    if number == signal.SIGINT:
        return
    assert main(["--config", str(config)]) == 0
    assert not marker.exists()
    assert weights(tmp_path, 4)


def test_a_signal_during_an_evaluation_costs_nothing(tmp_path, shards, monkeypatch):
    """What was cut short is made up for, so that the records are those of a run that nothing stopped."""
    changes = {"train__steps": 6, "train__evaluate_every": 2, "evaluation": retrieval(shards)}
    trees = [run_tree(tmp_path / name, shards, **changes) for name in ("whole", "stopped")]
    train(trees[0])
    run = RetrievalConfig.run
    calls = []

    def run_signalled(self, *args):
        calls.append(args)
        if len(calls) in (2, 4):  # after step 4, and at the end
            os.kill(os.getpid(), signal.SIGTERM)
        return run(self, *args)

    monkeypatch.setattr(RetrievalConfig, "run", run_signalled)
    config = TrainConfig.model_validate(trees[1])
    marker = tmp_path / "stopped" / "tiny" / "stopped.json"
    for step in (4, 6):
        assert train(config).stopped == "SIGTERM"
        facts = json.loads(marker.read_text())
        assert (facts["step"], facts["checkpoint"]) == (step, f"checkpoints/step-{step:08d}")
        assert not (marker.parent / "summary.json").exists()
    assert train(config).finished
    assert not marker.exists()
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "stopped")


def train_on_own_data(trees):
    return error_of(trees[int(os.environ["RANK"])])


def test_machines_with_other_data_are_refused(tmp_path, shards, ranks):
    other = caption_shards(tmp_path / "other", counts=(17, 12))
    trees = [run_tree(tmp_path, shards), run_tree(tmp_path, other)]
    told = ranks(2, train_on_own_data, trees, init=False)
    where = [f"data.sources[0]: {tree['data']['sources'][0]['path']}: " for tree in trees]
    found = "rank 1 found other samples than rank 0"
    assert all(f"{each}{found}" in message for each, message in zip(where, told, strict=True))
    assert all("delete `packed` and `index` in the cache" in " ".join(message.split()) for message in told)


def test_too_few_samples_for_processes_or_microbatches_are_refused():
    with pytest.raises(ConfigError, match="got 12, fewer than the 13 processes"):
        require_samples(ScheduleConfig(batch_size=12), 13)
    with pytest.raises(ConfigError, match=r"train\.micro_batches: got 7, more than the 6 samples of a process"):
        require_samples(ScheduleConfig(batch_size=12, micro_batches=7), 2)
