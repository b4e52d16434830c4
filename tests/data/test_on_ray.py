"""Jobs on a Ray of two workers; `tests/tokenize_dataset/test_on_ray.py` has the command that uses it."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.on_ray import small_ray
from vqclip.data.on_ray import RayCluster, RayOptions, connect_to_ray
from vqclip.errors import ConfigError, StorageError, VqclipError

ray = pytest.fixture(scope="module")(small_ray)


@pytest.fixture
def cluster(ray: None) -> Iterator[RayCluster]:
    with connect_to_ray(RayOptions(actors=2), 1, "cpu") as found:
        yield found


@dataclass
class Job:
    """Does one thing to item 3, and answers with the square of the others."""

    deed: Callable[[int], Any]

    def open(self) -> Callable[[int], dict[str, Any]]:
        return self._work

    def _work(self, item: int) -> dict[str, Any]:
        if item == 3:
            self.deed(item)
        return {"square": item * item}


def fail_on_disk(item: int) -> None:
    raise StorageError(f"{item}.tar: gone", "changed shard")


def fail_by_mistake(item: int) -> None:
    raise ZeroDivisionError("a mistake\nin two lines")


def full_disk(item: int) -> None:
    raise OSError(28, "No space left on device", "/full/00003.tar")


def die(item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class DieOnce:
    flag: Path

    def __call__(self, item: int) -> None:
        if not self.flag.exists():
            self.flag.touch()
            die(item)


def nothing(item: int) -> None:
    pass


def squares(cluster: RayCluster, deed: Callable[[int], Any], items: range = range(40)) -> dict[int, int]:
    return {item: result["square"] for item, result in cluster.map(Job(deed).open, items, "shard")}


@pytest.mark.slow
def test_each_item_once(cluster: RayCluster) -> None:
    assert squares(cluster, nothing) == {item: item * item for item in range(40)}
    assert squares(cluster, nothing, range(0)) == {}


@pytest.mark.slow
def test_an_item_whose_worker_dies_is_done_by_another(cluster: RayCluster, tmp_path: Path) -> None:
    assert squares(cluster, DieOnce(tmp_path / "flag")) == {item: item * item for item in range(40)}
    assert (tmp_path / "flag").exists()


@pytest.mark.slow
def test_an_item_that_always_kills_its_worker_ends_the_job(cluster: RayCluster) -> None:
    with pytest.raises(VqclipError, match="shard 3: the worker that made it died 4 times"):
        squares(cluster, die)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "kind", "message"),
    [
        (fail_on_disk, StorageError, "^3.tar: gone$"),
        (fail_by_mistake, VqclipError, "^ZeroDivisionError: a mistake$"),
        (full_disk, VqclipError, "^/full/00003.tar: No space left on device$"),
    ],
)
def test_errors_of_workers_arrive_in_one_line(
    cluster: RayCluster,
    deed: Callable[[int], Any],
    kind: type[Exception],
    message: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(kind, match=message) as error:
        squares(cluster, deed)
    assert type(error.value) is kind
    assert getattr(error.value, "kind", "changed shard") == "changed shard"
    assert ("in fail_by_mistake" in caplog.text) == (deed is fail_by_mistake)
    assert capfd.readouterr() == ("", "")


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
    with (
        pytest.raises(ConfigError, match=r"--engine ray: cannot import .* pip install 'vqclip\[ray\]'"),
        connect_to_ray(RayOptions(), 1, "cpu"),
    ):
        pass


def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = SimpleNamespace(is_initialized=lambda: False)  # its `init` would try for minutes
    monkeypatch.setitem(sys.modules, "ray", silent)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for scheme in ("", "ray://"):
            with (
                pytest.raises(ConfigError, match=rf"--ray-address: got {scheme}{address}, .* refused"),
                connect_to_ray(RayOptions(address=scheme + address), 1, "cpu"),
            ):
                pass
