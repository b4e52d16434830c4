from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.run_store.store import Store
from vqclip.data.remote import folder, retry
from vqclip.train.run_store import lease


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store at every URL, and no waiting for leases or between tries."""
    files = Store(skip_instance_cache=True)
    files.failing = {}
    files.store.clear()
    monkeypatch.setattr(folder, "object_store", lambda url, timeout_s: files)
    monkeypatch.setattr(retry, "_sleep", lambda seconds: None)
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    monkeypatch.setattr(lease, "EXPIRE_S", 0.3)
    monkeypatch.setattr(lease, "_POLL_S", 0.02)
    yield files
    files.store.clear()
