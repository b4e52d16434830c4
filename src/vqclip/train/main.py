"""Train a model: ``python -m vqclip.train --config configs/base.yaml`` or ``torchrun ... -m vqclip.train``.

Reads top to bottom in the order of the data: configuration, samples, model, steps, checkpoints, evaluation, export.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from vqclip import checkpoint, dist
from vqclip.config import to_yaml
from vqclip.data import mask_credentials
from vqclip.errors import ConfigError, DataError, StopRequested
from vqclip.evaluation import prepare, try_all
from vqclip.io.atomic import write_text
from vqclip.process import progress
from vqclip.process.lock import RunLock
from vqclip.process.memory import keep_freed_memory
from vqclip.process.signals import StopSignals
from vqclip.process.watchdog import Watchdog
from vqclip.runlog.console import LogFile, log_to_file, print_and_log
from vqclip.runlog.records import Records
from vqclip.runlog.stopped import remove_stopped, write_stopped
from vqclip.seeds import derive_seed
from vqclip.train.config import TrainConfig
from vqclip.train.export import export_tokenizer, recorded_speed, write_summary
from vqclip.train.loop import Loop, require_success
from vqclip.train.resume import Resumed, RetentionPolicy, Snapshots
from vqclip.train.step import TrainStep, towers_draw
from vqclip.train.summary import RunSummary, caption_facts, render, summarise

_TIME_TO_SPEAK_S = 5.0


def run(config: TrainConfig) -> RunSummary | None:
    """Run a configuration from where it stands to its end, on this process's share of every global batch.

    Returns:
        What the run reached; None when a signal stopped it before the end: its state is saved, and `stopped.json` in
        its folder says so.

    Raises:
        VqclipError: for anything a user can mend; the message says how.
    """
    device = _device(config.run.device)
    if device.type == "cpu":
        keep_freed_memory()
    dist.init(device, config.run.timeout_s)
    with (
        LogFile(config.run.path, mask_credentials) as log,
        StopSignals(notice=dist.is_main()) as stop,
        progress.report_to(stop.raise_if_requested),
    ):
        try:
            with RunLock(config.run.path) as lock:
                return _train(config, device, lock, log, stop)
        except StopRequested:
            _note_stop(config, stop)
            return None
        finally:
            dist.shutdown()  # within, as a scheduler may ask more than once


def _train(config: TrainConfig, device: torch.device, lock: RunLock, log: LogFile, stop: StopSignals) -> RunSummary:
    folder = config.run.path
    _check_world(config.train.batch_size, config.train.micro_batches)
    _make_folder(folder)  # so that a wrong place is found now, not after the data
    lock.take()
    log.open()

    torch.manual_seed(derive_seed(config.run.seed, "weights"))  # the same weights on every rank
    model = config.model.build().to(device, torch.float64 if config.train.precision == "fp64" else torch.float32)
    _leave_if_any_requested(stop)
    data = config.data.build(
        model.image.tower.image_size, model.text.preprocess.with_lengths, config.train.batch_size, config.run.seed
    )
    _leave_if_any_requested(stop)
    prepare(config.evaluation)  # so that a wrong path is found now, not at the end
    step = TrainStep(
        model,
        config.loss.build(),
        config.optim.build(model),
        config.optim.schedule(config.train.steps),
        config.train,
        config.optim.clip_grad_norm,
        config.run.seed,
        config.guards.build(),
    )
    _require_same_data(data.fingerprint)
    identity = config.identity(data.fingerprint, towers_draw=towers_draw(model))
    snapshots = Snapshots(
        folder / "checkpoints",
        identity,
        step,
        RetentionPolicy(config.train.keep_checkpoints, config.train.keep_every),
        config.run.resume_allow,
        config.train.save_in_background,
    )
    resumed = _resume(config, snapshots)
    start = resumed.step
    _leave_if_any_requested(stop)
    if dist.is_main():
        write_text(
            folder / "config.yaml", to_yaml(config, mask_credentials)
        )  # whoever is shown a run need not read its data
        remove_stopped(folder)

    with (
        snapshots,
        Watchdog(folder / "stacks", config.run.step_timeout_s, config.run.timeout_s) as watchdog,
        progress.report_to(watchdog.beat),
        Records(folder, start, data, resumed.counts, config.train.keep_best, resumed.best) as records,
    ):
        loop = Loop(config, data, step, lock, snapshots, records, stop, watchdog)
        done = loop.run(start)
        if done < config.train.steps:
            raise StopRequested
        watchdog.at(done, "evaluating", patient=True)
        if dist.is_main():  # before the evaluation, so that one that fails costs nothing
            export_tokenizer(model, folder / "tokenizer")
        outcome = loop.evaluate(done)
        best = dist.broadcast_json(records.best)
        exported = best["step"] if config.train.export == "best" and best and outcome.failure is None else done
        if exported != done:
            snapshots.load_model(exported)
            outcome = try_all(model, config.evaluation, precision=config.train.precision)
            if dist.is_main():
                export_tokenizer(model, folder / "tokenizer")

    speed, processes = loop.clock.overall, dist.world_size()
    if not speed:  # nothing was left to train
        speed, processes = recorded_speed(folder) or (speed, processes)
    paths = {"folder": folder, "checkpoint": snapshots.path(exported), "tokenizer": folder / "tokenizer"}
    coverage = data.coverage(done)
    replaced = records.bad.counts.total()
    summary = summarise(config.run.name, model, coverage, replaced, speed, processes, outcome.results, paths)
    captions = caption_facts(records.bad.lengths, model.text.num_tokens)
    health = step.guards.collapse.health() if step.guards.collapse else {}
    summary = dataclasses.replace(summary, step=exported, best=best, captions=captions, health=health)
    if dist.is_main() and (outcome.results or outcome.failure is None):  # else what stands there knows more
        write_summary(summary, config)
    require_success(outcome)
    if dist.is_main():
        log_to_file(render(summary))
    return summary


def _require_same_data(fingerprint: dict[str, Any]) -> None:
    """Machines may hold other files under the same names, or an older copy of what lies at a URL."""
    prints = dist.gather_json(fingerprint)
    others = [str(rank) for rank, each in enumerate(prints) if each != prints[0]]
    if others:
        raise DataError(
            f"data.sources: rank {', '.join(others)} found other samples than rank 0; expected the same shards on every"
            " machine. Bring them up to date; for shards at URLs, delete `shards` and `index` in the cache folder "
            "(VQCLIP_CACHE) of each machine"
        )


def _leave_if_any_requested(stop: StopSignals) -> None:
    """Leave, on every rank, if a signal has come to one of them."""
    if dist.any_rank(stop.requested):
        raise StopRequested


def _note_stop(config: TrainConfig, stop: StopSignals) -> None:
    """Tell people and schedulers that the run can go on."""
    signals = [name for name in dist.gather_json(stop.name) if name is not None]
    if dist.is_main():
        done = write_stopped(config.run.path, config.train.steps, signals[0] if signals else None)
        gone = "torchrun is gone; " if dist.launcher_has_died() else ""
        print_and_log(f"{gone}stopped after step {done} of {config.train.steps}; the same command goes on from there")


def _resume(config: TrainConfig, snapshots: Snapshots) -> Resumed:
    found = dist.run_on_main(lambda: len(checkpoint.checkpoints(snapshots.folder)))
    if config.run.resume == "never" and found:
        raise ConfigError(
            f"run.resume: got 'never', but {snapshots.folder} holds checkpoints; choose another run.name, or 'auto'"
        )
    return snapshots.resume()


def _make_folder(folder: Path) -> None:
    if not dist.is_main():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"run.folder: cannot make the run's folder {folder}: {error.strerror}") from error


def _check_world(batch_size: int, micro_batches: int) -> None:
    share = batch_size // dist.world_size()
    if share == 0:
        raise ConfigError(
            f"train.batch_size: got {batch_size}, fewer than the {dist.world_size()} processes; expected at least one "
            "sample for each"
        )
    if micro_batches > share:
        raise ConfigError(
            f"train.micro_batches: got {micro_batches}, more than the {share} samples of a process (train.batch_size "
            f"{batch_size} over {dist.world_size()}); expected at least one sample for each micro-batch"
        )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device: got 'cuda', but torch sees no GPU; expected 'cpu' or 'auto'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, dist.local_rank()) if name == "cuda" else torch.device(name)
