"""Joining and leaving, who we are, and what a lost peer looks like."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d
from torch import nn

from tests.ranks import RankError
from vqclip import dist
from vqclip.dist._state import private_store
from vqclip.dist._torch_versions import GUARDS_PROCESS_GROUP, HAS_NN_ALL_GATHER
from vqclip.errors import ConfigError, DistributedError

COMPILED_AGAIN = pytest.mark.skipif(not GUARDS_PROCESS_GROUP, reason="torch before 2.12 compiles for one world size")


class Gathering(nn.Module):
    def forward(self, x):
        return dist.all_gather(x, [1] * dist.world_size()) + dist.replicated_sum(x)


def call_before_and_after_init(compiled):
    module = Gathering()
    if compiled:
        module.compile(backend="aot_eager", fullgraph=True)
    x = torch.tensor([1.0 + int(os.environ["RANK"])])
    seen = [(dist.is_distributed(), dist.world_size(), dist.rank(), module(x).tolist())]
    dist.init("cpu", 30)
    dist.init("cpu", 30)  # a second call changes nothing
    seen.append((dist.is_distributed(), dist.world_size(), dist.rank(), module(x).tolist()))
    dist.shutdown()
    dist.shutdown()
    seen.append((dist.is_distributed(), dist.world_size(), dist.rank(), module(x).tolist()))
    return seen, dist.local_rank()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILED_AGAIN)], ids=["eager", "compiled"])
def test_state_is_read_when_called(ranks, compiled):
    for rank, (seen, local_rank) in enumerate(ranks(2, call_before_and_after_init, compiled, init=False)):
        alone = (False, 1, 0, [2.0 * (rank + 1)])
        assert seen == [alone, (True, 2, rank, [4.0, 5.0]), alone]
        assert local_rank == rank


def test_an_environment_that_names_no_job_or_a_wrong_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    dist.init("cpu", 1.0)
    assert not c10d.is_initialized()
    assert (dist.rank(), dist.world_size(), dist.is_main(), dist.is_distributed()) == (0, 1, True, False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DistributedError, match=r"not WORLD_SIZE, MASTER_ADDR, MASTER_PORT.*torchrun"):
        dist.init("cpu", 1.0)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DistributedError, match="rank 3 needs GPU 3, but this machine has 2"):
        dist.init("cuda", 1.0)


def init_alone():
    if os.environ["RANK"] == "0":
        started = time.monotonic()
        try:
            dist.init("cpu", 1.0)
        except DistributedError as error:
            return str(error), time.monotonic() - started
    return None


def test_init_does_not_wait_for_ever(ranks):
    message, seconds = ranks(2, init_alone, init=False)[0]
    assert message.startswith("init failed on rank 0")
    assert seconds < 20


def init_on_a_busy_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        os.environ["MASTER_PORT"] = str(other.getsockname()[1])
        with pytest.raises(DistributedError) as error:
            dist.init("cpu", 5.0)
    return os.environ["MASTER_PORT"], str(error.value)


def test_a_port_in_use_is_named(ranks):
    port, message = ranks(1, init_on_a_busy_port, init=False)[0]
    assert message.startswith(f"port {port} of this machine is in use by another program")


COLLECTIVES = {
    "all_gather": lambda x: dist.all_gather(x, [2, 2]),
    "all_gather (sizes)": dist.all_gather,
    "replicated_sum": dist.replicated_sum,
    "reduce_": lambda x: dist.reduce_(x.detach()),
    "reduce_scatter": lambda x: dist.reduce_scatter(x.detach(), [1, 1]),
    "ring_shift": lambda x: dist.start_ring_shift([x.detach()], 2)(),
    "broadcast_json": dist.broadcast_json,
}


def die_or_collect():
    dist.barrier()
    if dist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_gather(torch.ones(2, 3), [2, 2])
    except DistributedError as error:
        return str(error)


def test_a_dead_peer_is_an_error_that_names_the_collective(ranks):
    with pytest.raises(RankError, match="rank 1 of 2: the process died") as error:
        ranks(2, die_or_collect, timeout=20.0)
    assert error.value.results[0].startswith("all_gather failed on rank 0: ")
    assert "Another rank has most likely died" in error.value.results[0]


def wait_in_backward(gathered):
    with dist.named_errors("backward"):
        gathered.sum().backward()


def collect_while_rank_zero_stalls():
    # A group for each, for gloo gives a group up once a wait in it has failed.
    world = c10d.group.WORLD
    groups = {name: c10d.new_group(timeout=timedelta(seconds=0.5)) for name in [*COLLECTIVES, "backward"]}
    c10d.group.WORLD = groups["backward"]
    gathered = dist.all_gather(torch.ones(2, 3, requires_grad=True), [2, 2])
    messages = {}
    if dist.rank() == 1:
        for name, call in {**COLLECTIVES, "backward": lambda x: wait_in_backward(gathered)}.items():
            c10d.group.WORLD = groups[name]
            try:
                call(torch.ones(2, 3, requires_grad=True))
            except DistributedError as error:
                messages[name] = str(error)
    c10d.group.WORLD = world
    dist.barrier()
    return messages


def test_a_stalled_peer_is_an_error_within_the_timeout(ranks):
    messages = ranks(2, collect_while_rank_zero_stalls)[1]
    for name in COLLECTIVES:
        assert messages[name].startswith(f"{name} failed on rank 1: "), messages
    named = "backward" if HAS_NN_ALL_GATHER else "all_gather (backward)"
    assert messages["backward"].startswith(f"{named} failed on rank 1: "), messages


def test_named_errors_names_lost_peers_only():
    with pytest.raises(DistributedError, match="DDP's backward failed"), dist.named_errors("DDP's backward"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    with pytest.raises(RuntimeError, match="size mismatch"), dist.named_errors("DDP's backward"):
        raise RuntimeError("size mismatch")


@pytest.mark.parametrize(("name", "launcher"), [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")])
@pytest.mark.parametrize("tasks", ["1", "2"])
def test_a_task_of_another_launcher_is_told_that_it_works_alone(monkeypatch, caplog, name, launcher, tasks):
    monkeypatch.setenv(name, tasks)
    assert not dist.init("cpu")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (tasks == "2")
    assert all(f"one of 2 tasks of {launcher} ({name}), but torchrun" in each for each in told)


def test_a_device_is_one_that_can_be_used():
    assert dist.choose_device("cpu", "run.device") == torch.device("cpu")
    for name in ("cuda:99", "nonsense", "meta:x", {"a": 0}):
        with pytest.raises(ConfigError, match=r"run\.device: got .*, which cannot be used \(.*; expected cpu, cuda"):
            dist.choose_device(name, "run.device")


def meet(store, delays, life):
    """What each rank finds under "address" where rank 0 writes the number of its life."""

    def rank(number):
        time.sleep(delays[number])
        own = private_store(store, number, len(delays), 20.0)
        if number == 0:
            time.sleep(0.2)  # the others are there before
            own.set("address", life)
        return own.get("address").decode()

    with ThreadPoolExecutor(len(delays)) as pool:
        return list(pool.map(rank, range(len(delays)), timeout=30))


@pytest.mark.parametrize("delays", [(0, 0, 0), (0.3, 0, 0.1), (0, 0.3, 0)], ids=str)
def test_each_life_finds_its_own_and_not_what_the_last_one_left(delays):
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=20))
    for life in "abc":
        assert meet(store, delays, life) == [life] * 3


def test_who_waits_for_a_rank_0_that_never_comes_is_told():
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=20))
    meet(store, (0, 0), "a")
    with pytest.raises(c10d.DistError, match="not all ranks arrived within 0.3 s"):
        private_store(store, 1, 2, 0.3)
