"""Which ranks share a machine."""

from __future__ import annotations

import pytest

from vqclip import dist


def on_nodes(groups: list[str | None]) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if group := groups[dist.rank()]:
            patch.setenv("GROUP_RANK", group)
        else:
            patch.delenv("GROUP_RANK", raising=False)
        return dist.nodes()


def test_nodes_are_those_of_torchrun_or_machines(ranks) -> None:
    assert dist.nodes() == (0,)
    assert ranks(3, on_nodes, [None, None, None]) == [(0, 0, 0)] * 3
    assert ranks(3, on_nodes, ["7", "0", "7"]) == [(0, 1, 0)] * 3
