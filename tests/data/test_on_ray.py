"""Jobs on a Ray of two workers; `tests/tokenize_dataset/test_on_ray.py` has the command that uses it."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.on_ray import small_ray
from vqclip.data.on_ray import RayOptions, connect_to_ray
from vqclip.errors import ConfigError, VqclipError

ray = pytest.fixture(scope="module")(small_ray)


class DeadlyJob:
    """Kills its worker with item 3."""

    def open(self) -> Callable[[int], dict[str, int]]:
        return self._work

    def _work(self, item: int) -> dict[str, int]:
        if item == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}


@pytest.mark.slow
def test_an_item_that_always_kills_its_worker_ends_the_job(ray: None) -> None:
    died = pytest.raises(VqclipError, match="shard 3: the worker that made it died 4 times")
    with connect_to_ray(RayOptions(actors=2), 1, "cpu") as cluster, died:
        list(cluster.map(DeadlyJob().open, range(40), "shard"))


@pytest.mark.slow
def test_sizes_of_workers(ray: None) -> None:
    for device in ("cpu", "auto"):
        with connect_to_ray(RayOptions(), 2, device) as cluster:
            assert not cluster.on_gpu
    for options, threads, device, message in (
        ({}, 3, "cpu", "3 CPUs and 0 GPUs does not fit .* the largest has 2 CPUs and 0 GPUs"),
        ({}, 1, "cuda", "1 CPUs and 1 GPUs does not fit .* the largest has 2 CPUs and 0 GPUs"),
        ({"gpus": 0.5}, 1, "cpu", "--ray-gpus: got 0.5 with --device cpu"),
        ({"gpus": 0.5}, 1, "auto", "1 CPUs and 0.5 GPUs does not fit"),
    ):
        with pytest.raises(ConfigError, match=message), connect_to_ray(RayOptions(**options), threads, device):
            pass


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = pytest.raises(ConfigError, match=r"--engine ray needs the package ray, .* pip install 'vqclip\[ray\]'")
    with refused, connect_to_ray(RayOptions(), 1, "cpu"):
        pass


def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = SimpleNamespace(is_initialized=lambda: False)  # its `init` would try for minutes
    monkeypatch.setitem(sys.modules, "ray", silent)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for scheme in ("", "ray://"):
            refused = pytest.raises(ConfigError, match=rf"--ray-address: got {scheme}{address}, .* refused")
            with refused, connect_to_ray(RayOptions(address=scheme + address), 1, "cpu"):
                pass
