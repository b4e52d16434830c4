"""Code counts over a window of the newest tokens, from which codebook usage is reported.

every step:    count(stats)    add the codes of the step; no collective, no waiting for the device
every report:  sums(stats)     the window, summed over ranks
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vqclip import dist
from vqclip.quantizers import Stats

TOKENS_PER_CODE = 4
"""Tokens for each code of a codebook in a full window."""


class CodeWindows:
    """Windows of the codebooks of a model.

    A window contains the last T to 2 T tokens of a codebook of K codes, T = ``TOKENS_PER_CODE`` K, plus those of a
    step. It has two parts; the older one is dropped when the newer one is full. Each rank counts a share of the global
    batch: its own codes, or on rank 0 those that are reduced already. The sum over ranks is the same for any number of
    processes. A window needs two int64 numbers per code.
    """

    def __init__(self) -> None:
        self._windows: dict[str, Tensor] = {}
        """``image/0/codes`` → ``(2, 1 + C K)`` int64: tokens of the global batch and this rank's share of the
        code counts, of the older and of the newer part."""

    def count(self, stats: Mapping[str, Stats], skip: Tensor) -> None:
        """Add the codes of a step.

        Args:
            stats: by modality, over the global batch; `Stats.histograms` of this rank.
            skip: () bool on the device, True for a step that does not count.
        """
        windows = {}
        for modality, name in ((modality, name) for modality, each in stats.items() for name in _code_counts(each)):
            codes, tokens = stats[modality][name], stats[modality][_tokens_of(name)]
            is_mine = name in stats[modality].histograms or dist.is_main()
            new = torch.cat((tokens.view(1), codes.flatten() * is_mine))
            window = self._windows.get(f"{modality}/{name}")
            if window is None or window.shape[1] != len(new):  # another codebook, where the run allows it on resume
                window = new.new_zeros(2, len(new))
            older, newer = window.to(new.device)
            full = newer[0] >= TOKENS_PER_CODE * codes.shape[-1]
            parts = torch.where(full, newer, older), torch.where(full, new, newer + new)
            windows[f"{modality}/{name}"] = torch.where(skip, torch.stack((older, newer)), torch.stack(parts))
        self._windows = windows

    def sums(self, stats: Mapping[str, Stats]) -> dict[str, Stats]:
        """Return the newest statistics, with the codes and tokens of the window in place of their own. A collective.

        Args:
            stats: those of the newest `count`.
        """
        windows = _sum_over_ranks({name: each.sum(dim=0, keepdim=True) for name, each in self._windows.items()})
        found = {}
        for modality, each in stats.items():
            sums = dict(each)
            for name in _code_counts(each):
                tokens, codes = windows[f"{modality}/{name}"].flatten().tensor_split([1])
                sums |= {_tokens_of(name): tokens.squeeze(), name: codes.view_as(each[name])}
            found[modality] = Stats(sums, is_global=True)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the state: the windows over all ranks. A collective."""
        return _sum_over_ranks(self._windows)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`, the same on every rank.

        Raises:
            ValueError: it is not valid.
        """
        for name, window in tensors.items():
            fits = window.dtype == torch.int64 and window.dim() == 2 and len(window) == 2 and window.numel() > 2
            if not fits or window.min() < 0 or window.max() > 2**53:
                raise ValueError(
                    f"{name}: got {window.dtype} {tuple(window.shape)}; expected counts, int64 (2, 1 + C K)"
                )
        # Rank 0 has the counts of all ranks until now.
        self._windows = {
            name: torch.cat((window[:, :1], window[:, 1:] * dist.is_main()), dim=1) for name, window in tensors.items()
        }


def _sum_over_ranks(windows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return windows ``(n, 1 + C K)`` with the code counts of all ranks, in one exchange."""
    if not windows:
        return {}
    counts = [each[:, 1:] for each in windows.values()]
    flat = dist.reduce_(torch.cat([each.flatten() for each in counts]))
    parts = zip(windows.items(), flat.split([each.numel() for each in counts]), strict=True)
    return {name: torch.cat((each[:, :1], part.view(len(each), -1)), dim=1) for (name, each), part in parts}


def _code_counts(stats: Stats) -> list[str]:
    """Return the names of the code counts over the global batch."""
    return [name for name in stats if name.split("/")[-1] == "codes" and "own" not in name.split("/")]


def _tokens_of(name: str) -> str:
    return f"{name.removesuffix('codes')}tokens"
