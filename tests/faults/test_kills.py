"""Faults at random moments of whole lives: no run is lost, and what comes out is what would have come out.

A life: shards without an index, two ranks under torchrun with a data worker each, residual VQ with k-means, dropout of
depths and codes that die, bad samples, checkpoints in the background, evaluations, export, summary, exit status 0. In
a disturbed one the job is killed up to five times; the same command is given until it ends with status 0, and the
whole run folder is compared with that of a life that nothing disturbed. Half of the kills come at moments drawn
uniformly over the life, half at moments of a phase. All draws are keyed by (number of the kill, of the try).

    VQCLIP_KILLS=100 OMP_NUM_THREADS=1 python -m pytest -m faults tests/faults/test_kills.py -k lives -s

Half of the kills hit lives with weights in shards, of which each rank writes its own rows.
"""

import collections
import contextlib
import os
import random
import re
import signal
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.data.making import caption_shards, write_tar
from tests.faults.jobs import children, global_batches, job
from tests.models import BUSY_RESIDUAL
from tests.training import largest_difference, retrieval, run_tree, weights

KILLS = int(os.environ.get("VQCLIP_KILLS", "12"))

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600 + 60 * KILLS)]

STEPS, EVERY = 24, 4
PARALLEL = ("ddp", "fsdp")
START_S = 300.0
"""What a start may take."""
END_S = 20.0
"""In which all processes must have ended after a kill."""
STOPS = ("SIGTERM", "SIGHUP", "SIGINT")
KILLED = ("torchrun", "a rank", "a restarted rank", "all ranks", "a worker", "all")
KINDS = tuple(f"SIGKILL to {whom}" for whom in KILLED)
KINDS += tuple(f"{name} to {whom}" for name in STOPS for whom in ("torchrun", "a rank"))
MOMENTS = ("any",) * 6 + ("index", "train", "save", "evaluate", "export", "summary")
ORDER = ("index", "any", "train", "save", "evaluate", "export", "summary")
"""Of the kills in a life, so that few come too late."""
OUTPUTS = ("", "", "/dev/full", "head -c 600")
"""Where the last start of a life writes to: a file, a full disk, a reader that goes away."""


def tree_of(folder, shards, **changes):
    return run_tree(folder, shards, BUSY_RESIDUAL, **({"train__precision": "fp32"} | changes))


def life_tree(folder, shards, parallel):
    pairs = retrieval(shards, batch_size=6, max_bad_fraction=0.2)
    changes = {"train__steps": STEPS, "train__checkpoint_every": EVERY, "train__evaluate_every": EVERY}
    changes |= {"train__keep_best": "eval/pairs/codes_only/i2t_r1", "evaluation": pairs, "run__timeout_s": 120.0}
    changes |= {
        "train__parallel": parallel,
        "guards": {"spikes": {"window": 10, "deviations": 0.1}},
        "data__max_bad_fraction": 0.2,
        "optim__lr": 1e-4,  # so that the loss goes up and down
    }
    return tree_of(folder, shards, data__workers=1, **changes)


class Life:
    """One life, start after start; what goes wrong is collected in ``problems``."""

    def __init__(self, folder, shards, parallel, whole=None):
        self.folder, self.tree, self.run = folder, life_tree(folder, shards, parallel), folder / "tiny"
        self.startup_s, self.length_s = (whole.startup_s, whole.length_s) if whole else (0.0, 0.0)
        self.problems, self.saved, self.damaged = [], set(), False

    def start(self, *options, output="", **fault):
        return job(self.folder / "job", self.tree, {"each_step_s": 0.1} | fault, *options, output=output)

    def finish(self, output=""):
        """Start it, and let it come to its end."""
        with self.start(output=output) as running:
            self.require_finished(running)
            times = [path.stat().st_mtime for path in running.marks.glob("step-0-0")]
        self.startup_s, self.length_s = max(times, default=0) - running.begun, time.time() - running.begun

    def require_finished(self, running):
        status, _ = running.end(START_S)
        if status or (self.run / "stopped.json").exists() or not (self.run / "summary.json").exists():
            self.problems.append(f"did not finish: status {status}\n{running.output[-1500:]}")

    def newest(self):
        return max((int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-*")), default=0)

    def kill(self, kind, moment, draw):
        """Start it and kill it: (what was hit, phase, seconds since the start, seconds to the end).

        None where it came to its end before.
        """
        name, _, whom = kind.partition(" to ")
        options = ("--max-restarts", "1") if "restarted" in whom else ()
        steps_left = STEPS - self.newest()
        after = draw.uniform(0, self.startup_s + (self.length_s - self.startup_s) * steps_left / STEPS)
        goal = STEPS - steps_left + draw.randrange(max(1, min(2 * EVERY, steps_left)))
        # Slow steps, so that ranks that outlive torchrun do not end by themselves.
        with self.start(*options, **({"each_step_s": 1.0} if whom == "torchrun" else {})) as running:
            while not (time.time() - running.begun >= after if moment == "any" else reached(running, moment, goal)):
                if running.process.poll() is not None:
                    self.require_finished(running)
                    return None
                assert time.time() - running.begun < START_S, f"waited too long\n{running.output}"
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.03))
            phase, begun, since = running.phase(), max(running.steps(0), default=-1) + 1, time.time()
            whom = strike(running, getattr(signal, name), whom, draw)
            if "restarted" in whom:
                self.require_finished(running)
            while (left := running.left()) and time.time() < since + END_S:
                time.sleep(0.02)
            took = time.time() - since
        if left:
            self.problems.append(f"{len(left)} processes live {END_S:g} s after {name} to {whom} in {phase}")
        if (self.run / "stopped.json").exists() or (phase == "save" and self.newest() == STEPS):
            self.saved.add(self.newest())
        orderly = name in STOPS or whom == "torchrun"  # whose death is a signal to the ranks
        if orderly and phase in ("train", "save", "evaluate") and self.newest() < begun:
            self.problems.append(f"{name} to {whom} lost steps {self.newest()} to {begun}\n{running.output[-1500:]}")
        return f"{name} to {whom}", phase, since - running.begun, took

    def damage(self, draw):
        """Start it, and flip a bit of a weight in rank 1's memory: it must end with an error that names the rank."""
        self.damaged = True
        with self.start(rank=1, flip_in_step=draw.randrange(self.newest(), STEPS)) as running:
            before = len(running.output)
            status, _ = running.end(START_S)
        told = running.output[before:]
        if status == 0 or "rank 1 differs" not in told:
            self.problems.append(f"a flipped bit on rank 1 was not noticed: status {status}\n{told[-1500:]}")


def drawn(number):
    """Kind and moment of a kill: in each twelve of them each kind once, and each phase once."""
    block, place = divmod(number, len(KINDS))
    kind, moment = (random.Random(f"{each[0]} {block}").sample(each, len(each))[place] for each in (KINDS, MOMENTS))
    return kind, "train" if "worker" in kind else moment  # which is when there are workers


def reached(running, moment, goal):
    """Whether a job is where it is to be killed."""
    if moment in ("train", "evaluate") and max(running.steps(0), default=-1) < goal:
        return False
    return moment == "train" or running.phase() == moment


def strike(running, number, whom, draw):
    """Signal them, or torchrun where there are none yet; returns whom."""
    ranks = running.ranks()
    one = draw.choice(ranks) if ranks else 0
    targets = {"all ranks": ranks, "a worker": children(one)[-1:], "all": running.left(), "torchrun": []}
    pids = targets.get(whom, ranks and [one])
    for pid in pids or [running.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return whom if pids else "torchrun"


MAY_DIFFER = r"^tiny/(report\.html$|\.?run.lock|train\.[a-z0-9.]*log|stacks/|tensorboard/)|^job/cache/(\.tmp-|index/\.)"


def facts(life):
    """All that a life left, by name, without what may differ.

    These are the times and speeds in records, summary and card; who held the lock; logs and the stacks of lost ranks;
    TensorBoard's files, but not their figures; the page, which draws speeds; and in the cache what a killed process was
    just writing.
    """
    found = {"batches": global_batches(life.folder / "job" / "records.jsonl")}
    for path in sorted(path for place in (life.run, life.folder / "job" / "cache") for path in place.rglob("*")):
        name = str(path.relative_to(life.folder))
        if path.is_dir() or re.search(MAY_DIFFER, name):
            continue
        found[name] = path.read_bytes()
    in_json = r'(, )?"(\w+_per_second|data_wait|exchange_wait|memory_gib)": [-+.e\d]+|"speed": {[^}]*}'
    speed = in_json + r"|speed +(\d+ images/s on 2 .*|no step was left.*)"
    for name in found:
        if re.search(r"^tiny/[^/]*$|\.md$", name):
            found[name] = re.sub(speed, "", found[name].decode())
    board = EventAccumulator(str(life.run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith("speed/")]
    found["tensorboard"] = {tag: [(each.step, each.value) for each in board.Scalars(tag)] for tag in tags}
    return found


def differences(whole, life):
    """Names of what differs.

    Checkpoints that a signal asked for take the places of others, and one that was killed while it removed old ones
    may leave some.
    """
    found = facts(life)
    steps = {*life.saved, *range(0, STEPS, EVERY)} - {STEPS} if life.saved else ()
    allowed = [f"tiny/checkpoints/{aside}step-{step:08d}/" for step in steps for aside in ("", ".tmp-removed-")]
    lacking = {name for name in whole.keys() ^ found.keys() if not name.startswith(tuple(allowed))}
    return sorted(lacking | {name for name in whole.keys() & found.keys() if whole[name] != found[name]})


@pytest.mark.parametrize("parallel", PARALLEL)
def test_whole_lives(tmp_path, parallel):
    shards = caption_shards(tmp_path / "shards", counts=(17, 13))
    write_tar(shards / "00002.tar", {"000000099.jpg": b"\xff\xd8\xff no picture", "000000099.txt": b"x"})
    folder = tmp_path / "life"  # of each of them, as configuration and summary hold it
    whole = Life(folder, shards, parallel)
    whole.finish()
    assert not whole.problems, whole.problems[0]
    expected = facts(whole)
    assert {*expected} >= {f"tiny/{name}.jsonl" for name in ("metrics", "bad_samples", "events")}
    folder.rename(tmp_path / "whole")
    print(f"undisturbed: {whole.length_s:.1f} s, {whole.startup_s:.1f} s of them before the first step")

    numbers = range(PARALLEL.index(parallel), KILLS, len(PARALLEL))
    waiting, hits, lives, good = [(number, 0) for number in numbers], collections.Counter(), 0, 0
    while waiting:
        choice = random.Random(f"life {lives}")
        life, size, done = Life(folder, shards, parallel, whole), choice.randint(1, 5), []
        taken, waiting = waiting[:size], waiting[size:]
        for number, attempt in sorted(taken, key=lambda each: ORDER.index(drawn(each[0])[1])):
            kind, moment = drawn(number)
            hit = life.kill(kind, moment, random.Random(f"{number} {attempt}"))
            if hit is None:  # too late: another try in another life
                waiting.append((number, attempt + 1))
                continue
            done.append(
                f"kill {number}: {hit[0]} in {hit[1]} ({moment} moment), {hit[2]:.2f} s after the start; "
                f"all ended {hit[3]:.1f} s later"
            )
            hits.update(hit[:2])
            if lives % 3 == 0 and not life.damaged and life.newest() < STEPS:
                life.damage(choice)
        output = choice.choice(OUTPUTS)
        life.finish(output)
        if not life.problems:
            life.problems += [f"{name} differs" for name in differences(expected, life)]
        good += 0 if life.problems else len(done)
        print(
            f"life {lives}, the last start writing to {output or 'a file'}: {'NOT ' * bool(life.problems)}the same",
            *done,
            *life.problems,
            sep="\n  ",
            flush=True,
        )
        folder.rename(tmp_path / f"life-{lives}")
        lives += 1
    print(", ".join(f"{name}: {count}" for name, count in sorted(hits.items())))
    print(f"{good} of {len(numbers)} kills in {lives} lives ended with the bits of the undisturbed one")
    assert good == len(numbers)


def finish(folder, tree, processes, fault=None):
    with job(folder / "job", tree, fault or {}, processes=processes) as running:
        status, _ = running.end(400)
        assert status == 0, running.output


def test_the_number_of_processes_may_change_in_the_middle_of_an_epoch(tmp_path, shards):
    """2 → 1 → 4 → 2 processes, stopped by SIGTERM, against 2 all along: 30 samples in batches of 8."""
    steps = 40
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    changes = {"train__steps": steps, "train__precision": "fp64", "train__batch_size": 8}
    finish(whole, tree_of(whole, shards, **changes), 2)
    tree = tree_of(changed, shards, **changes)
    for processes, stop_at in ((2, 7), (1, 16), (4, 29), (2, None)):
        fault = {} if stop_at is None else {"do": "ask_to_stop", "rank": 0, "step": stop_at}
        finish(changed, tree, processes, fault)
        later = 1 + (processes > 1)  # several processes stop a step later (ADR 44)
        assert stop_at is None or (changed / f"tiny/checkpoints/step-{stop_at + later:08d}").exists()

    one, other = (global_batches(folder / "job" / "records.jsonl") for folder in (whole, changed))
    assert one == other
    assert sorted(one) == list(range(steps))
    assert all(len(batches) == 1 for batches in other.values())
    seen = [i for step in range(30) for batch in other[step] for i in batch]  # 240 samples: eight epochs of 30
    assert sorted(seen) == sorted(list(range(30)) * 8)
    difference = largest_difference(weights(whole, steps), weights(changed, steps))
    print(f"largest relative difference of a tensor: {difference:.2g}")
    assert difference < 1e-6
