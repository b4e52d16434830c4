"""Train a model: `run`, also ``vqclip train --config configs/base.yaml``, also under torchrun.

Reads top to bottom in the order of the data flow: task, samples, step, checkpoints, loop, evaluation, export.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vqclip import dist
from vqclip.config import to_yaml
from vqclip.data import TrainData, mask_credentials
from vqclip.errors import CheckpointError, ConfigError, DataError, StopRequested
from vqclip.evaluation import EvaluationOutcome, Result, prepare, try_all
from vqclip.io.atomic import remove_leftovers, write_text
from vqclip.process import progress
from vqclip.process.lock import RunLock
from vqclip.process.memory import keep_freed_memory
from vqclip.process.signals import StopSignals
from vqclip.process.watchdog import REPORT_S, Watchdog
from vqclip.report.run_files import ABOUT_FILE
from vqclip.runlog.console import LogFile, log_to_file
from vqclip.runlog.health import Health, HealthSettings
from vqclip.runlog.records import Records, remove_stopped, write_stopped
from vqclip.seeds import derive_seed
from vqclip.train.callbacks import Callback, Training
from vqclip.train.callbacks.builtin import evaluate, in_order, require_success, write_pages
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.config import ScheduleConfig, TaskConfig
from vqclip.train.export import export_tokenizer, recorded_speed, write_summary
from vqclip.train.feature_cache import store_features
from vqclip.train.guards import Guards
from vqclip.train.job_checks import compare_machines, require_space
from vqclip.train.loop import train
from vqclip.train.optim import Schedule, describe_groups
from vqclip.train.resume import Resumed, load_model, resume
from vqclip.train.run_store import RunMirror
from vqclip.train.step import TrainStep
from vqclip.train.summary import RunSummary, describe_run, render, summarise
from vqclip.train.tasks.base import Task
from vqclip.train.tasks.kinds import load_task_config

logger = logging.getLogger(__name__)

_lock = threading.Lock()
"""Held by the run in progress."""


@dataclass(frozen=True)
class RunResult:
    """Outcome of `vqclip.train.run`, the same on every rank; ``print(result)`` shows the summary.

    result = run("configs/base.yaml", overrides=["run.name=mine"])
    result.metrics["loss/total"], result.results, result.tokenizer
    """

    config: TaskConfig
    """Configuration of the run."""
    step: int
    """Steps done; for a finished run those of the exported model."""
    metrics: dict[str, float]
    """Newest value of every metric that was recorded since `run` was called, by its name in ``metrics.jsonl``."""
    stopped: str | None
    """Signal, or reason given to `Training.request_stop`, that stopped the run before its end; None: it is finished."""
    summary: RunSummary | None
    """Sizes, speed and further figures of a finished run; None for a stopped one."""

    @property
    def finished(self) -> bool:
        """True if the run has reached its end, its evaluation and its export."""
        return self.summary is not None

    @property
    def folder(self) -> Path:
        """Folder of the run on this machine."""
        return self.config.run.path

    @property
    def tokenizer(self) -> Path | None:
        """Folder for `vqclip.load_tokenizer`; None for a stopped run."""
        return None if self.summary is None else Path(self.summary.tokenizer)

    @property
    def results(self) -> list[Result]:
        """Evaluations of the exported model; empty for a stopped run."""
        return [] if self.summary is None else self.summary.results

    def __str__(self) -> str:
        if self.summary is not None:
            place = "" if self.config.run.url is None else f"\n  stored at   {self.config.run.url}   (vqclip copy-run)"
            return f"{render(self.summary)}{place}"
        steps, optim = self.config.train.steps, self.config.optim
        how = "run it again to resume from its newest checkpoint"
        share = Schedule(optim, steps)(max(0, self.step - 1)) / optim.lr
        never_fell = self.step > optim.warmup_steps and share > 0.5 and optim.schedule != "constant"
        rate = f"; the learning rate is still {share:.0%} of its highest" if never_fell else ""
        return f"stopped after step {self.step} of {steps} ({self.stopped}){rate}; {how}"


def run(
    config: TaskConfig | Mapping[str, Any] | str | Path,
    callbacks: Iterable[Callback] = (),
    *,
    overrides: Sequence[str] = (),
    owns_process: bool = False,
) -> RunResult:
    """Train a configuration to its end, from its newest checkpoint if there is one.

    Computes what ``vqclip train`` computes, to the last bit. It may be called several times in one process, one run
    after the other, and in any thread; it leaves torch's random state, handlers of signals and of logging, and a
    process group of the caller as they were.

    Ctrl-C and the other signals of `vqclip.process.signals.STOP_SIGNALS` save a checkpoint and return; a second Ctrl-C
    raises `KeyboardInterrupt`. In a thread other than the main one, which Python sends no signals, use
    `Training.request_stop` in a callback. Every rank of a job calls this function, under torchrun or in a process group
    that the caller has initialised.

    Args:
        config: the configuration, as an object, as plain data, or as a YAML file.
        callbacks: called after the built-in ones, the same on every rank; see `vqclip.train.Callback`.
        overrides: changes of the configuration, such as ``optim.lr=1e-3``.
        owns_process: whether the process does nothing else, as that of the command: the allocator of the C library is
            set to keep freed memory, which makes steps on a CPU about a tenth faster and cannot be reset, and a run
            that hangs ends its process. Otherwise a run that hangs writes its stacks and a warning, except in a job of
            several processes, which always ends.

    Returns:
        The outcome of the run; `RunResult.stopped` says whether a signal or a callback stopped it before its end.

    Raises:
        ConfigError: an invalid configuration, or another run of this process is in progress.
        VqclipError: for anything else that a user can correct; the message says how.
    """
    config = load_task_config(config, overrides)
    callbacks = list(callbacks)
    for number, each in enumerate(callbacks):
        if not isinstance(each, Callback):
            raise ConfigError(f"callbacks[{number}]: got {each!r}; expected an instance of vqclip.train.Callback")
    device = dist.choose_device(config.run.device, "run.device")
    with exclusive_run(config.run.path), preserve_torch_state(device):
        if owns_process and device.type == "cpu":
            keep_freed_memory()
        # Where a watchdog runs, it reports a hang before the collectives that wait for it fail.
        later_s = 0.0 if config.run.step_timeout_s is None else REPORT_S
        joined, started = dist.init(device, config.run.timeout_s + later_s), list[Training]()
        with (
            LogFile(config.run.path, mask_credentials, dist.rank()) as log,
            StopSignals(notice=dist.is_main()) as stop,
            progress.report_to(stop.raise_if_requested),
        ):
            try:
                at_url = config.run.url is not None and dist.is_main()
                remote = RunMirror(str(config.run.url), config.run.path, config.run.remote) if at_url else None
                with RunLock(config.run.path) as lock, remote or contextlib.nullcontext() as mirror:
                    try:
                        _claim_folder(config, lock, mirror, log)
                        config = config.fit()
                        require_samples(config.train, dist.world_size())
                        summary = _run(config, device, lock, mirror, stop, in_order(callbacks), owns_process, started)
                        metrics = dict(started[0].metrics)
                        return RunResult(config, summary.step, metrics, None, summary)
                    except StopRequested:
                        return _report_stop(config, mirror, stop, started)
            finally:
                if joined:
                    dist.shutdown()  # before the handlers are removed: a scheduler may send its signal more than once


def _run(
    config: TaskConfig,
    device: torch.device,
    lock: RunLock,
    mirror: RunMirror | None,
    stop: StopSignals,
    callbacks: Sequence[Callback],
    owns_process: bool,
    started: list[Training],
) -> RunSummary:
    """Train, evaluate and export; the training is put into ``started`` before its first step."""
    task = build_task(config, device)
    _leave_if_requested(stop)
    data = build_data(config, task)
    _leave_if_requested(stop)
    prepare(config.evaluation, task.evaluated)  # so that a wrong path is an error now, not at the end
    step = build_step(config, task)
    checkpointer = _build_checkpointer(config, step, data, mirror)
    resumed = resume(checkpointer, config.run.resume_allow)
    _leave_if_requested(stop)
    _write_config(config, mirror, resumed.step)
    if resumed.step < config.train.steps:
        store_features(config.feature_makers(task), data, config.data, config.train.precision, config.run.seed)
        config.release_stored(task)
    else:
        logger.info("all %d steps are done; evaluated again. run.name=... begins another run", config.train.steps)

    limits, ends_process = (config.run.step_timeout_s, config.run.timeout_s), owns_process or dist.is_distributed()
    with (
        checkpointer,
        Watchdog(config.run.path / "stacks", *limits, ends_process) as watchdog,
        progress.report_to(watchdog.beat),
        _open_records(config, task, data, resumed) as records,
    ):
        training = Training(config, data, step, lock, checkpointer, records, stop, watchdog, resumed.step)
        started.append(training)
        train(training, callbacks)
        if training.stopping:
            raise StopRequested
        outcome, exported, best = _export_and_evaluate(training)
    return _summarise(training, outcome, exported, best)


def _claim_folder(config: TaskConfig, lock: RunLock, mirror: RunMirror | None, log: LogFile) -> None:
    """Make and lock the run's folder before any work is done, and begin the log in it."""
    for tracker in config.run.trackers:
        tracker.require()
    lock.acquire()
    dist.run_on_main(lambda: None if mirror is None else mirror.open())
    if dist.is_main():
        remove_leftovers(config.run.path)
    log.open()
    compare_machines(config)


def require_samples(settings: ScheduleConfig, processes: int) -> None:
    """Check that every process has a sample of each batch for each of its microbatches.

    Raises:
        ConfigError: the batch is too small.
    """
    share = settings.batch_size // processes
    if share == 0:
        raise ConfigError(
            f"train.batch_size: got {settings.batch_size}, fewer than the {processes} processes; expected at least one "
            "sample for each"
        )
    if settings.micro_batches > share:
        raise ConfigError(
            f"train.micro_batches: got {settings.micro_batches}, more than the {share} samples of a process "
            f"(train.batch_size {settings.batch_size} over {processes}); expected at least one sample for each "
            "microbatch"
        )


def build_task(config: TaskConfig, device: torch.device) -> Task:
    """Build the task with the weights of the first step. A collective."""
    torch.manual_seed(derive_seed(config.run.seed, "weights"))  # the same weights on every rank
    return config.build_task(device)


def build_data(config: TaskConfig, task: Task) -> TrainData:
    """Open the training data; see `DataConfig.build`. A collective."""
    return config.data.build(task.size, task.tokenize, config.train.batch_size, config.run.seed)


def build_step(config: TaskConfig, task: Task) -> TrainStep:
    """Make the training step of a task with the weights of the first step. A collective with several processes."""
    optimizer = config.optim.build(task.model, task.discriminators)
    logger.info("%s", describe_groups(optimizer))
    return TrainStep(
        task,
        optimizer,
        Schedule(config.optim, config.train.steps),
        config.train,
        config.optim.clip_grad_norm,
        config.run.seed,
        Guards(config.guards),
        config.train.ema,
    )


def _build_checkpointer(config: TaskConfig, step: TrainStep, data: TrainData, mirror: RunMirror | None) -> Checkpointer:
    _require_same_data(config, data.fingerprint)
    folder, identity = config.run.path / "checkpoints", config.run_identity(step.task, data.fingerprint)
    dist.run_on_main(lambda: require_space(config.run.path, step))
    keep_last, background, every = (
        config.train.keep_checkpoints,
        config.train.save_in_background,
        config.train.keep_every,
    )
    checkpointer = Checkpointer(folder, identity, step, keep_last, background, mirror, config.run.timeout_s, every)
    if config.run.resume == "never" and dist.run_on_main(lambda: len(checkpointer.find())):
        raise ConfigError(
            f"run.resume: got 'never', but {config.run.url or config.run.path}/checkpoints contains checkpoints; "
            "choose another run.name, or 'auto'"
        )
    return checkpointer


def _open_records(config: TaskConfig, task: Task, data: TrainData, resumed: Resumed) -> Records:
    guards = config.guards
    codes = {name: each.codebook_sizes[0] for name, each in task.quantizers().items() if each.codebook_sizes}
    prompts = [len(each.classnames) * len(each.templates) for each in data.samples.sources]
    if all(prompts) and sum(prompts) < codes.get("text", 0):
        del codes["text"]  # so few texts cannot use all codes
    loss, chance, lowest = task.progress(config.train.batch_size)
    health = HealthSettings(
        collapse=guards.collapse,
        divergence=guards.divergence,
        loss=loss,
        chance=chance,
        lowest=lowest,
        codes=codes,
        warmup_steps=config.optim.warmup_steps,
        every=config.train.report_every,
        end=config.train.steps,
    )
    if dist.is_main():
        about = json.dumps(describe_run(task, config, health).model_dump(mode="json"), indent=2)
        try:
            write_text(config.run.path / ABOUT_FILE, f"{about}\n")
        except OSError as error:
            logger.warning("%s: cannot be written: %s; the run's page does without it", ABOUT_FILE, error.strerror)
    keep_best, best, trackers, facts = config.train.keep_best, resumed.best, config.run.trackers, config.facts()
    return Records(
        config.run.path, resumed.step, data, resumed.counts, Health(health), keep_best, best, trackers, facts
    )


def _write_config(config: TaskConfig, mirror: RunMirror | None, done: int) -> None:
    """Write the configuration, with credentials masked so that it can be shared; the run at a URL is this job's now."""
    if dist.is_main():
        write_text(config.run.path / "config.yaml", to_yaml(config, mask_credentials))
        remove_stopped(config.run.path)
    dist.run_on_main(lambda: None if mirror is None else mirror.claim(done))


def _export_and_evaluate(training: Training) -> tuple[EvaluationOutcome, int, dict[str, Any] | None]:
    """Export and evaluate the last step, then the best one if ``train.export`` asks for it.

    Returns:
        The outcome of the evaluation, the step that was exported, and the best step.
    """
    config, folder = training.config, training.config.run.path / "tokenizer"
    training.watchdog.at(training.done, "evaluating", patient=True)
    with training.step.whole_task() as whole:
        if dist.is_main():  # before the evaluation: one that fails costs no step
            export_tokenizer(whole, folder)
    outcome = training.outcome or evaluate(training)
    best = dist.broadcast_json(training.records.best)
    if config.train.export != "best" or not best or outcome.failure is not None or best["step"] == training.done:
        return outcome, training.done, best
    try:
        load_model(training.checkpointer, best["step"])
    except CheckpointError as error:
        if dist.is_main():
            logger.warning(
                "train.export: the best checkpoint cannot be used, so step %d stays: %s", training.done, error
            )
        return outcome, training.done, best
    with training.step.whole_task() as whole:
        outcome = try_all(whole.evaluated, config.evaluation, precision=config.train.precision, details=config.report)
        if dist.is_main():
            export_tokenizer(whole, folder)
    write_pages(config.report, config.run.path, best["step"], outcome)
    return outcome, best["step"], best


def _summarise(
    training: Training, outcome: EvaluationOutcome, exported: int, best: dict[str, Any] | None
) -> RunSummary:
    """Write and return the summary; raise the failure of the evaluation, if there was one."""
    config, folder = training.config, training.config.run.path
    speed, processes = training.clock.overall, dist.world_size()
    if not speed:  # no step was left to train
        speed, processes = recorded_speed(folder) or (speed, processes)
    summary = summarise(training, outcome.results, exported, best, speed, processes)
    if dist.is_main() and (outcome.results or outcome.failure is None):  # otherwise keep the former summary
        write_summary(summary, config)
    write_pages(config.report, folder, training.done)
    mirror = training.checkpointer.mirror
    dist.run_on_main(lambda: None if mirror is None else mirror.upload_files())
    require_success(outcome)
    if dist.is_main():
        log_to_file(render(summary))
    return summary


def _leave_if_requested(stop: StopSignals) -> None:
    """Raise StopRequested on every rank if one of them has received a signal."""
    if dist.any_rank(stop.requested):
        raise StopRequested


def _report_stop(
    config: TaskConfig, mirror: RunMirror | None, stop: StopSignals, started: Sequence[Training]
) -> RunResult:
    """Tell people and schedulers that the run can be resumed."""
    reason = next((each for each in dist.gather_json(stop.reason) if each is not None), "requested")
    saved = dist.run_on_main(lambda: write_stopped(config.run.path, config.train.steps, reason))
    dist.run_on_main(lambda: None if mirror is None else mirror.upload_files())
    done, metrics = (started[0].done, dict(started[0].metrics)) if started else (saved, {})
    result = RunResult(config, done, metrics, reason, None)
    if dist.is_main():
        if dist.launcher_has_died():
            logger.warning("torchrun is gone")
        log_to_file(str(result))
    return result


def _require_same_data(config: TaskConfig, fingerprint: dict[str, Any]) -> None:
    """Compare the data of all ranks: machines may hold other files under the same names, or an old copy of a URL."""
    for number, (source, found) in enumerate(zip(config.data.sources, fingerprint["sources"], strict=True)):
        if others := dist.differing_ranks(found):
            name = mask_credentials(str(getattr(source, "path", source.kind)))
            raise DataError(
                f"data.sources[{number}]: {name}: rank {', '.join(others)} found other samples than rank 0; expected "
                "the same files, byte for byte, on every machine. Update them; for files at URLs, delete `packed` and "
                "`index` in the cache folder (VQCLIP_CACHE) of each machine"
            )


@contextlib.contextmanager
def exclusive_run(folder: Path) -> Iterator[None]:
    """Refuse a second run in this process while the block runs: both would draw from torch's global generator.

    Raises:
        ConfigError: a run is in progress, in another thread or around this one.
    """
    if not _lock.acquire(blocking=False):
        raise ConfigError(
            f"run.name: {folder} cannot train while this process trains another run; wait for its end, or start "
            "another process: runs share torch's random generator, the log and the process group"
        )
    try:
        yield
    finally:
        _lock.release()


@contextlib.contextmanager
def preserve_torch_state(device: torch.device) -> Iterator[None]:
    """Check that torch has its own defaults, without which a run would have other bits; restore the random state.

    Args:
        device: of the run; the random state of other GPUs is not used.

    Raises:
        ConfigError: the caller has changed a default.
    """
    found = {
        "torch.get_default_dtype()": (torch.get_default_dtype(), torch.float32),
        "torch.get_default_device()": (torch.get_default_device(), torch.device("cpu")),
        "torch.is_grad_enabled()": (torch.is_grad_enabled(), True),
        f"torch.is_autocast_enabled({device.type!r})": (torch.is_autocast_enabled(device.type), False),
    }
    if wrong := [f"{name}: got {got}, expected {want}" for name, (got, want) in found.items() if got != want]:
        raise ConfigError(f"{'; '.join(wrong)}: a run needs torch's own defaults; call it outside of such a block")
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        yield
