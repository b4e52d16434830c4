"""Detection of runs that no longer learn and of codebooks that have collapsed.

every step:    count(stats)       code counts, added to a sliding window of tokens; no collective
every report:  windows(stats)     the window, summed over ranks
               check(figures)     gradient of 0? all embeddings equal? loss at chance? few codes in use?
                                  warn once for each sign, when it has lasted `steps` steps
at the end:    health()           verdict for the summary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vqclip import dist
from vqclip.config import Config
from vqclip.io.json_files import Strict
from vqclip.io.tensors import first_names
from vqclip.quantizers import Stats
from vqclip.runlog.signs import RESTART, USAGE, find_signs, has_collapsed, read_codebooks, suggest_remedies

TOKENS_PER_CODE = 4
"""Tokens for each code of a codebook in a full window."""
MAX_WARNINGS = 1000
"""Warnings that a run keeps; older ones are in its log."""
_PAUSES = 3
"""Absence of a sign, in multiples of `CollapseConfig.steps`, after which it is reported again."""
HEALTHY = "no sign of collapse"
"""Verdict on a run without signs."""


class CollapseConfig(Config):
    """Thresholds for a collapsed run or codebook."""

    usage: float = Field(USAGE, gt=0, le=1)
    """A codebook has collapsed if its perplexity is below this fraction of the codes that the same number of tokens
    would use if all codes were equally likely; also if nearly all its tokens have one code."""
    steps: int = Field(20, ge=1)
    """Steps for which a codebook uses too few codes, or the loss is at chance, before the warning; a gradient of 0 and
    equal embeddings are reported at once."""

    def build(self) -> CollapseWatch:
        """Make the watch of a run."""
        return CollapseWatch(self)


_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Number = Annotated[float, Field(ge=0, lt=2**53)]


class _Codebook(Strict):
    name: str
    codes: Annotated[int, Field(ge=1)]
    tokens: _Number
    usage_if_uniform: _Number
    usage: _Number
    perplexity: _Number


class _Warning(Strict):
    step: _Count
    text: Annotated[str, Field(max_length=10_000)]


class _State(Strict):
    last: _Count
    since: dict[str, _Count]
    told: dict[str, str]
    warnings: Annotated[list[_Warning], Field(max_length=MAX_WARNINGS)]
    codebooks: list[_Codebook]
    seen: dict[str, _Count] = {}  # absent from checkpoints of former versions

    @model_validator(mode="after")
    def _told_has_a_beginning(self) -> _State:
        if unknown := self.told.keys() - self.since.keys():
            raise ValueError(f"told: {sorted(unknown)[0]!r} is not in since")
        return self


class CollapseWatch:
    """Watch for collapse: counts codes over a window of tokens, checks every report, and warns once for each sign.

    A window contains the last T to 2 T tokens of a codebook of K codes, T = ``TOKENS_PER_CODE`` K, plus those of a
    step. It has two parts; the older one is dropped when the newer one is full. Each rank counts a share of the global
    batch: its own codes, or on rank 0 those that are reduced already. The sum over ranks is the same for any number of
    processes. A window needs two int64 numbers per code.

    Args:
        config: thresholds.
    """

    def __init__(self, config: CollapseConfig):
        self._config = config
        self._last = 0
        """Step of the last report; 0 before the first."""
        self._windows: dict[str, Tensor] = {}
        """``image/0/codes`` → ``(2, 1 + C K)`` int64: tokens of the global batch and this rank's share of the
        code counts, of the older and of the newer part."""
        self._since: dict[str, int] = {}
        self._reported: dict[str, str] = {}
        """Present signs that were reported → their last text."""
        self._seen: dict[str, int] = {}
        """Signs that were ever reported → last step with them."""
        self._warnings: list[dict[str, Any]] = []
        self._codebooks: list[dict[str, Any]] = []

    def count(self, stats: Mapping[str, Stats], skip: Tensor) -> None:
        """Add the codes of a step to the windows, without waiting for the device.

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

    def windows(self, stats: Mapping[str, Stats]) -> dict[str, Stats]:
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

    def check(
        self, done: int, figures: Mapping[str, float], sizes: Mapping[str, Sequence[int]], loss: float, chance: float
    ) -> list[str]:
        """Check the metrics of a report, and return the new warnings.

        Args:
            done: steps done.
            figures: ``grad_norm``; of each modality ``<modality>/embedding_cosine`` and the metrics of its quantizer
                over the window.
            sizes: codebook sizes by modality.
            loss: the contrastive loss; NaN while the learning rate warms up, when it may stay at chance.
            chance: loss of a model that knows nothing.
        """
        signs = find_signs(figures, loss, chance)
        self._codebooks = [each for name, every in sizes.items() for each in read_codebooks(name, figures, every)]
        collapsed = {each["name"]: each for each in self._codebooks if has_collapsed(each, self._config.usage)}
        unseen = done if self._last or done < self._config.steps else 0  # a first report this late covers the start
        self._since = {name: self._since.get(name, unseen) for name in (*signs, *collapsed)}
        at_once = _AT_ONCE | (collapsed.keys() if done - self._last >= self._config.steps else set())  # rare reports
        self._last = done
        due = [name for name, since in self._since.items() if name in at_once or done - since >= self._config.steps]
        pause = _PAUSES * self._config.steps
        told = {name for name, last in self._seen.items() if done - last < pause} | self._reported.keys()
        messages = [f"{signs[name]}. {RESTART}" for name in due if name in signs and name not in told]
        for modality in sizes:
            late = [collapsed[name] for name in due if _modality(name) == modality and name in collapsed]
            if any(each["name"] not in told for each in late):
                messages.append(f"{self._describe(late)}. {suggest_remedies(modality)}")
        self._reported = {name: signs.get(name, "") for name in due}
        self._seen |= dict.fromkeys(due, done)
        self._warnings += [{"step": done, "text": message} for message in messages]
        del self._warnings[:-MAX_WARNINGS]
        return messages

    def health(self) -> dict[str, Any]:
        """Return the verdict on the run after the last report, as JSON values.

        ``verdict`` is a line of text, ``codebooks`` the usage over the window, ``warnings`` those of the whole run. A
        codebook that has collapsed in the last report counts without a warning: the next report may never come.
        """
        signs = [text for text in self._reported.values() if text]
        is_due = self._last >= self._config.steps
        lost = [each for each in self._codebooks if is_due and has_collapsed(each, self._config.usage)]
        for modality in dict.fromkeys(_modality(each["name"]) for each in lost):
            signs.append(self._describe([each for each in lost if _modality(each["name"]) == modality]))
        dead = any(self._reported.values())
        verdict = f"{'DEAD' if dead else 'COLLAPSED'}: {'; '.join(signs)}" if signs else HEALTHY
        return {"verdict": verdict, "codebooks": self._codebooks, "warnings": self._warnings}

    def _describe(self, codebooks: Sequence[Mapping[str, Any]]) -> str:
        """Describe collapsed codebooks of one modality."""
        first = codebooks[0]
        modality, _, number = first["name"].partition("/")
        of = [each for each in self._codebooks if _modality(each["name"]) == modality]
        numbers = first_names([each["name"].partition("/")[2] for each in codebooks], shown=20)
        named = f"codebook{'s' * (len(codebooks) > 1)} {numbers} of {len(of)}" if number else "the codebook"
        used = _span([each["usage"] * each["codes"] for each in codebooks])
        since = min(self._since.get(each["name"], self._last) for each in codebooks)
        return (
            f"{modality}: {named} ha{'ve' if len(codebooks) > 1 else 's'} collapsed since step {since} or before: "
            f"{used} of {first['codes']:,} codes in use over {first['tokens']:,.0f} tokens, where evenly used codes "
            f"would be {first['usage_if_uniform'] * first['codes']:,.0f}; perplexity "
            f"{_span([each['perplexity'] for each in codebooks])}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON part of the state; `tensors` is the other."""
        plain = {"since": self._since, "told": self._reported, "warnings": self._warnings, "codebooks": self._codebooks}
        return {"last": self._last, "seen": self._seen, **plain}

    def tensors(self) -> dict[str, Tensor]:
        """Return the windows over all ranks. A collective."""
        return _sum_over_ranks(self._windows)

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the results of `state_dict` and `tensors`, the same on every rank.

        Raises:
            ValueError: they could not have given this.
        """
        for name, window in tensors.items():
            fits = window.dtype == torch.int64 and window.dim() == 2 and len(window) == 2 and window.numel() > 2
            if not fits or window.min() < 0 or window.max() > 2**53:
                raise ValueError(
                    f"{name}: got {window.dtype} {tuple(window.shape)}; expected counts, int64 (2, 1 + C K)"
                )
        plain = _State.model_validate(state).model_dump()
        self._last, self._since, self._reported = plain["last"], plain["since"], plain["told"]
        self._seen = dict.fromkeys(self._reported, self._last) | plain["seen"]
        self._warnings, self._codebooks, self._windows = plain["warnings"], plain["codebooks"], {}
        for name, window in tensors.items():  # rank 0 has the counts of all ranks until now
            counts = window[:, 1:] * dist.is_main()
            self._windows[name] = torch.cat((window[:, :1], counts), dim=1)


_AT_ONCE = {"gradient", "image embeddings", "text embeddings"}


def mean_cosine(embedded: Stats, modality: str) -> Tensor:
    """Return the () mean cosine of all pairs of a batch of unit vectors, from their sum and ``count``."""
    count = embedded["count"].double()
    return (embedded[modality].double().square().sum() - count) / (count * (count - 1)).clamp(min=1)


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


def _span(numbers: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{each(numbers):,.0f}" for each in (min, max)))


def _modality(name: str) -> str:
    return name.partition("/")[0]
