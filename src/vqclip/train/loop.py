"""The training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from vqclip import dist
from vqclip.data.workers import explain_worker_deaths
from vqclip.errors import NonFiniteError, StopRequested, VqclipError
from vqclip.runlog.bar import ProgressBar
from vqclip.train.callbacks import Callback, Training

logger = logging.getLogger(__name__)


def train(training: Training, callbacks: Sequence[Callback]) -> None:
    """Train to the last step of the run, until ``train.patience`` is lost, or a signal or a callback asks for a stop.

    Afterwards ``training.done`` is the number of steps done, and a checkpoint of them is on the disk, unless a callback
    wants none.

    Args:
        training: the run, restored from its checkpoint.
        callbacks: all callbacks, built-in ones included; see `vqclip.train.callbacks.in_order`.

    Raises:
        VqclipError: for anything a user can correct; the message says how.
    """
    settings, watchdog, is_on_gpu = training.config.train, training.watchdog, training.step.device.type == "cuda"
    try:
        _call(callbacks, "on_train_start", training)
        watchdog.at(training.done, "waiting for the next batch", patient=True)  # the data workers start
        stop = training.done if training.ended else settings.steps
        if training.done < stop:
            steps = f"steps {training.done + 1:,} to {stop:,}"
            logger.info("training: %s, %d samples a step", steps, settings.batch_size)
        batches = training.data.batches(training.done, stop, pin_memory=is_on_gpu, judge=False)
        writes = training.records.metrics is not None
        with (
            contextlib.closing(batches),  # data workers end before the last checkpoint is waited for
            explain_worker_deaths(),
            ProgressBar(settings.steps, training.done, writes, training.config.run.name) as bar,
        ):
            training.bar = bar
            apply_requests = exchange_requests(training)
            for batch in training.clock.time_waits(batches):
                training.batch = batch
                _call(callbacks, "on_step_start", training)
                changes = training.step.move_to_step(batch.step)
                if changes or training.step.task.computes_anew(batch.step):
                    watchdog.expect_compilation()
                watchdog.at(training.done, "in the next step")
                with _record_nonfinite(training):
                    training.result = training.step(batch, batch.step)
                training.done += 1
                training.clock.count(settings.batch_size)
                bar.advance()
                apply_requests()
                if training.needs_verdict:
                    with _record_nonfinite(training):
                        training.step.guards.settle()
                _record_events(training)  # first: an unusual step is on record whatever happens next
                _call(callbacks, "on_step_end", training)
                watchdog.at(training.done, "waiting for the next batch")
                apply_requests = exchange_requests(training)
                if not dist.is_distributed():  # the only rank stops after this step
                    apply_requests()
                if training.stopping or training.ended:
                    break
            apply_requests()
            with _record_nonfinite(training):
                training.step.guards.settle()
            _call(callbacks, "on_train_end", training)
    except StopRequested:
        raise
    except Exception as error:
        _call(callbacks, "on_error", training, error)
        raise


def exchange_requests(training: Training) -> Callable[[], None]:
    """Begin to exchange what this rank asks for: a stop, one without a checkpoint, an end because of bad samples.

    Both this and the function that it returns are collectives; other ones may come between them.

    Returns:
        A function that sets the flags of the training that one rank at least has asked for. Of several processes, it is
        called in the next step, so that none waits for the others: all stop after the same step.
    """
    end = dist.start_any_rank(
        lambda: (training.stop.requested, training.discard_requested, training.data.has_too_many_bad)
    )

    def apply() -> None:
        training.stopping, training.discarding, training.met_too_many_bad = end()

    return apply


@contextlib.contextmanager
def _record_nonfinite(training: Training) -> Iterator[None]:
    """Record a step that ends the run in the block, and name the newest checkpoint in the error."""
    try:
        yield
    except NonFiniteError as error:
        judged, checkpointer = training.step.guards.batch, training.checkpointer
        batch = training.batch if judged is None else judged
        training.records.record_event("nonfinite", str(error), applied=False, batch=batch)
        checkpointer.require_finite(batch.step)
        raise NonFiniteError(f"{error}. {checkpointer.newest()}") from error


def _record_events(training: Training) -> None:
    """Record the unusual steps that the guards have reported since the step before; a collective if there are any."""
    events, training.step.guards.events = training.step.guards.events, []
    for event in events:
        training.records.record_event(event.kind, event.reason, not event.skip, event.batch)
        if event.kind == "nonfinite":  # if the weights are not finite, no later step can be
            training.checkpointer.require_finite(event.batch.step)


def _call(callbacks: Sequence[Callback], hook: str, training: Training, *args: object) -> None:
    for callback in callbacks:
        try:
            getattr(callback, hook)(training, *args)
            model = training.step.model
            if not all(part.training for part in (model, *model.children())):  # the hook used it in evaluation mode
                model.train()
        except (VqclipError, OSError, StopRequested):  # their messages are complete
            raise
        except Exception:
            logger.error("callback %s failed in %s, %d steps done", type(callback).__name__, hook, training.done)
            raise
