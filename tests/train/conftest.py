"""Fixtures shared by the tests of the training."""

import signal

import pytest


@pytest.fixture
def interruptible():
    """A shell's background job ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Cache folder of this test in this process and in the ranks that it starts."""
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / "cache"))
