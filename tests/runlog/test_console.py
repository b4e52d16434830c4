from __future__ import annotations

import logging

import pytest

from vqclip.runlog.console import log_to_stderr


@pytest.mark.parametrize("name", ["aiobotocore.credentials", "azure.core.pipeline", "botocore"])
def test_clients_of_stores_do_not_report_each_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    for each in (root, *map(logging.getLogger, ("aiobotocore", "azure", "botocore"))):
        monkeypatch.setattr(each, "level", each.level)
        monkeypatch.setattr(each, "handlers", [*each.handlers])
    root.setLevel(logging.INFO)
    log_to_stderr(str)
    assert logging.getLogger("vqclip").isEnabledFor(logging.INFO)
    assert not logging.getLogger(name).isEnabledFor(logging.INFO)
    assert logging.getLogger(name).isEnabledFor(logging.WARNING)
