"""One job at a time writes to a run folder at a URL."""

from __future__ import annotations

import json
import time

import pytest

from tests.train.run_store.store import URL
from vqclip.data.remote import TransferConfig
from vqclip.errors import CheckpointError, ConfigError
from vqclip.train.run_store import RemoteFolder, lease
from vqclip.train.run_store.lease import Lease

FOLDER = RemoteFolder(URL, TransferConfig())


def test_a_job_that_lives_is_not_disturbed_and_one_that_ended_is_not_waited_for(store):
    first, other = Lease(FOLDER, "disk a"), Lease(FOLDER, "disk b")
    first.acquire()
    try:
        with pytest.raises(ConfigError, match=r"s3://bucket/runs/tiny is in use by another job \(process \d+ on"):
            other.acquire()
        first.require()
    finally:
        first.release()
    begun = time.monotonic()
    other.acquire()
    other.release()
    assert time.monotonic() - begun < lease.EXPIRE_S


def test_a_killed_job_on_this_disk_is_not_waited_for_and_one_elsewhere_expires(store):
    FOLDER.write("lease/00000007.json", json.dumps({"disk": "disk a", "holder": "a killed job"}).encode())
    again = Lease(FOLDER, "disk a")
    begun = time.monotonic()
    again.acquire()
    assert time.monotonic() - begun < lease.EXPIRE_S
    again.release()
    FOLDER.write("lease/00000009.json", json.dumps({"disk": "disk a", "holder": "a killed job"}).encode())
    other = Lease(FOLDER, "disk b")
    begun = time.monotonic()
    other.acquire()
    assert time.monotonic() - begun >= lease.EXPIRE_S
    other.release()
    assert store.names() == ["lease/00000010.json"]


def test_a_job_that_slept_finds_that_it_was_replaced(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 99.0)
    asleep, other = Lease(FOLDER, "disk a"), Lease(FOLDER, "disk b")
    asleep.acquire()
    other.acquire()
    with pytest.raises(CheckpointError, match="was taken over by another job .process"):
        asleep.require()
    asleep.release()
    other.require()
    store.store.clear()
    with pytest.raises(
        CheckpointError, match="has lost its lease: its files were removed during the run; nothing more"
    ):
        other.require()
    other.release()


def test_a_lease_that_vanishes_between_listing_and_reading_was_removed(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 99.0)
    job = Lease(FOLDER, "disk a")
    job.acquire()
    store.failing["cat_file"] = [FileNotFoundError("the bucket is gone")]
    with pytest.raises(CheckpointError, match="its files were removed during the run"):
        job.require()
    job.release()


def test_of_two_jobs_that_start_at_once_one_gets_the_lease(store):
    """The store decides; where it does not, the content of the last one stays."""
    assert FOLDER.create("lease/00000001.json", b"one")
    assert not FOLDER.create("lease/00000001.json", b"other")
    assert FOLDER.create("lease/00000001.json", b"one")  # a try whose answer was lost


def test_leases_that_are_empty_or_have_the_last_number(store):
    FOLDER.write("lease/00000001.json", b"")
    store.failing["cat_file"] = [OSError(22, "The requested range is not satisfiable")]
    assert FOLDER.read("lease/00000001.json") == b""
    FOLDER.write("lease/99999999.json", json.dumps({"released": True}).encode())
    job = Lease(FOLDER, "disk a")
    job.acquire()
    job.require()
    job.release()
