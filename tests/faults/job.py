"""The training command with a fault in it: ``torchrun ... -m tests.faults.job config.json [fault.json]``.

A fault is ``{"do": name, "rank": 1, "step": 7}``: what `FAULTS` calls so happens on that rank in that step, in the
first life of the job only; with ``"in": "saving"`` or ``"evaluation"`` in place of the step, in that.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import vqclip.train.main as training
from tests.commands import command
from vqclip import dist
from vqclip.data import prepare
from vqclip.data.batch_maker import BatchMaker
from vqclip.evaluation.encode import Encoder
from vqclip.tokenizer import Tokenizer
from vqclip.train.checkpointer import Checkpointer
from vqclip.train.main import torch  # which is not imported before vqclip, as in the command itself
from vqclip.train.step import TrainStep

main = command("train")


def loop_for_ever() -> None:
    while True:
        pass


def hold_the_interpreter() -> None:
    """In C code that lets no other thread run, for longer than the universe will last."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_a_worker() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    time.sleep(20)


def enter_another_collective() -> None:
    """In which nobody ever joins."""
    dist.start_ring_shift([torch.zeros(3)], 3)()


def ask_to_stop() -> None:
    """As a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def take_ten_seconds() -> None:
    time.sleep(10)


def stand_still() -> None:
    time.sleep(1000)


FAULTS = {each.__name__: each for each in (
    loop_for_ever, hold_the_interpreter, ask_to_stop, kill_myself, kill_a_worker, enter_another_collective,
    take_ten_seconds, stand_still,
)}  # fmt: skip


def mark(name: str) -> None:
    """Tell the test that this point is reached."""
    Path(os.environ["MARKS"], f"{name}-{dist.rank()}").touch()


def record(step: int, sample_ids: list[int]) -> None:
    """Write down which samples this rank takes in a step."""
    life = f"{os.getppid()}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    line = json.dumps({"step": step, "rank": dist.rank(), "life": life, "ids": sample_ids})
    file = os.open(os.environ["RECORDS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())  # one write: what a kill leaves is whole lines
    os.close(file)


def before(owner: Any, name: str, happens: Any) -> None:
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        happens(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, both)


def inject(fault: dict[str, Any]) -> None:
    """Put the fault and the delays in."""
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    rank = int(os.environ["RANK"])

    def in_step(self: Any, batch: Any, number: int) -> None:
        mark(f"step-{number}")
        record(number, batch.sample_ids.tolist())
        time.sleep(fault.get("each_step_s", 0))
        if first_life and fault.get("do") in FAULTS and (rank, number) == (fault.get("rank"), fault.get("step")):
            FAULTS[fault["do"]]()
        if (rank, number) == (fault.get("rank"), fault.get("flip_in_step")):
            weight = next(self.model.parameters()).detach()
            weight.reshape(-1).view(torch.uint8)[0] ^= 16

    def in_worker(self: Any, task: Any) -> None:
        if first_life and fault.get("do") == "loader" and (rank, task.step) == (fault["rank"], fault["step"]):
            time.sleep(1000)

    def in_evaluation(*args: Any) -> None:
        mark("evaluation")
        if first_life and rank == fault.get("rank") and fault.get("in") == "evaluation":
            FAULTS[fault["do"]]()

    def in_batch(*args: Any) -> None:
        time.sleep(fault.get("each_evaluation_batch_s", 0))

    def in_shard(*args: Any) -> None:
        mark("indexing")
        time.sleep(fault.get("each_shard_s", 0))

    def in_save(*args: Any, **kwargs: Any) -> None:
        mark("saving")
        time.sleep(fault.get("saving_s", 0))
        if first_life and fault.get("in") == "saving":
            FAULTS[fault["do"]]()

    for name, phase in {"resume": "resume", "export_tokenizer": "export", "write_summary": "summary"}.items():
        before(training, name, lambda *args, phase=phase: mark(phase))
    before(TrainStep, "__call__", in_step)
    before(BatchMaker, "fill", in_worker)
    before(Encoder, "__call__", in_evaluation)
    before(Tokenizer, "with_continuous", in_batch)
    before(prepare, "prepare_shard", in_shard)
    before(Checkpointer, "_write_tensors", in_save)


if __name__ == "__main__":
    inject(json.loads(Path(sys.argv[2]).read_text()))
    sys.exit(main(["--config", sys.argv[1]]))
