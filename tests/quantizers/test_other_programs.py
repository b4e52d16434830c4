"""Quantizers in other people's programs: every one ends with the codes of a plain loop on one process."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel.scatter_gather import gather
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.quantizers.test_contract import CONFIGS
from tests.quantizers.test_training import busy
from tests.ranks import RankPool
from vqclip import dist
from vqclip.errors import ConfigError
from vqclip.lm_vocabulary import CodesEmbedding, CodesHeadConfig, MaskedBitsHeadConfig
from vqclip.quantizers import VQ, FSQConfig, Quantizer, QuantizerConfig, SimVQ, sync
from vqclip.quantizers.base import _warn_missing_update

FAMILIES: dict[str, QuantizerConfig] = {
    name: busy(CONFIGS[name])
    for name in (
        *("fsq", "lfq", "bsq", "vq", "vq, cosine", "vq, learned", "simvq", "identity"),
        *("residual of fsq with dropout", "residual of vq with dropout", "product of vq"),
    )
}
Forward = Callable[[Tensor], dict[str, Any]]
State = dict[str, Tensor]


class Model(nn.Module):
    """A layer and a quantizer; returns a dictionary, as many programs do."""

    def __init__(self, config: QuantizerConfig):
        super().__init__()
        torch.manual_seed(0)
        self.quantizer: Quantizer = config.build().double()
        torch.manual_seed(1)
        self.encoder = nn.Linear(6, self.quantizer.dim).double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.quantizer(self.encoder(x))
        return {"out": out, "parts": (out.vectors, out.stats)}


def batch(number: int, dim: int = 6) -> Tensor:
    return torch.randn(16, 5, dim, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def train(
    model: Model,
    forward: Forward,
    after_backward: Callable[[], None] = lambda: None,
    split: Sequence[int] = (16,),
    steps: Sequence[int] = range(8),
) -> State:
    """Train in the plain loop of docs/quantizers.md, on this rank's part of batches of 16 samples."""
    quantizer = model.quantizer
    quantizer.set_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in steps:
        vectors, ours = forward(batch(number).split(list(split))[dist.rank()])["parts"]
        (stats,) = sync([ours])
        losses = quantizer.losses(stats)
        weighted = sum((quantizer.loss_weights[k] * v for k, v in losses.items()), torch.zeros(()))
        optimizer.zero_grad()
        (dist.world_size() * vectors.square().sum() / 100 + weighted).backward()
        after_backward()
        optimizer.step()
        quantizer.update(stats)
    return dict(quantizer.state_dict())


@functools.cache
def plain(name: str) -> State:
    model = Model(FAMILIES[name])
    return copy.deepcopy(train(model, model))


def assert_same(found: State, name: str) -> None:
    torch.testing.assert_close(found, plain(name), rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def rebuilt(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors, as accelerate does: mappings of any class are made again of their items."""
    if isinstance(data, (list, tuple)):
        return type(data)(rebuilt(each, function) for each in data)
    if isinstance(data, Mapping):
        return type(data)({name: rebuilt(each, function) for name, each in data.items()})
    return function(data) if isinstance(data, Tensor) else data


def replaced(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors, as Lightning does: also in the fields of dataclasses, which it sets."""
    if not dataclasses.is_dataclass(data):
        if isinstance(data, tuple):
            return tuple(replaced(each, function) for each in data)
        if isinstance(data, Mapping):
            return type(data)({name: replaced(each, function) for name, each in data.items()})
        return function(data) if isinstance(data, Tensor) else data
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    found = copy.deepcopy(data, {id(value): value for value in fields.values()})
    for name, value in fields.items():
        setattr(found, name, replaced(value, function))
    return found


PROGRAMS: dict[str, Callable[[Model], Forward]] = {
    "pattern of accelerate": lambda model: lambda x: rebuilt(model(x), Tensor.clone),
    "pattern of Lightning": lambda model: lambda x: replaced(model(x), Tensor.clone),
    "checkpointing": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_a_plain_loop(program: str) -> None:
    for name, config in FAMILIES.items():
        model = Model(config)
        assert_same(train(model, PROGRAMS[program](model)), name)


def in_shards_on_two_ranks() -> dict[str, State]:
    found = {}
    for name, config in FAMILIES.items():
        model = Model(config)
        codes = list(model.quantizer.parameters())

        def average(codes: Sequence[nn.Parameter] = codes) -> None:
            for each in codes:
                if each.grad is not None:
                    c10d.all_reduce(each.grad.div_(2))

        fully_shard(model, mesh=c10d.init_device_mesh("cpu", (2,)), ignored_params=set(codes))
        found[name] = train(model, model, average, (10, 6))
    return found


def test_weights_in_shards_equal_one_process(ranks: RankPool) -> None:
    """Under DDP, `test_training.py` compares them."""
    for found in ranks(2, in_shards_on_two_ranks):
        for name in FAMILIES:
            assert_same(found[name], name)


def refusals_of_shards() -> list[str]:
    found = []
    for quantizer in (VQ(6, 8, learning="gradient", kmeans=False), SimVQ(6, 8)):
        fully_shard(quantizer, mesh=c10d.init_device_mesh("cpu", (2,)))
        out = quantizer(batch(0).float())
        quantizer.losses(out.stats)["codebook"].backward()
        for call in (lambda q=quantizer, out=out: q.update(out.stats), lambda q=quantizer, out=out: q.decode(out.ids)):
            try:
                call()
            except ConfigError as error:
                found.append(str(error))
    return found


def test_codes_in_shards_are_refused(ranks: RankPool) -> None:
    for found in ranks(2, refusals_of_shards):
        assert len(found) == 3  # an update of SimVQ touches no code
        assert all("codes in shards (fully_shard)" in each and "ignored_params" in each for each in found)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_averages_of_weights_and_buffers(average: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The averaged model can be used, and trained on: its codebooks do not start again."""
    averages = []
    for config in FAMILIES.values():
        model = Model(config)
        averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        for number in range(5):
            averaged.update_parameters(model)
            train(model, model, steps=[number])
        averaged.update_parameters(model)
        assert model.quantizer.started
        averages.append(averaged.module.quantizer)
    monkeypatch.setattr("vqclip.quantizers.vq.kmeans", None)
    for quantizer in averages:
        out = quantizer.eval()(batch(9, quantizer.dim))
        assert out.vectors.isfinite().all()
        assert not quantizer.codebook_sizes or quantizer.decode(out.ids).equal(out.vectors)
        quantizer.train().update(quantizer(batch(9, quantizer.dim)).stats)
        assert quantizer.started


def test_models_built_on_meta_are_whole_once_their_weights_are_loaded(tmp_path: Path) -> None:
    """Constants in buffers that are not saved were what the memory held: the ids of FSQ were out of range."""
    transformers = pytest.importorskip("transformers")

    class Host(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any):
            super().__init__(config)
            self.parts = nn.ModuleDict({name.replace(" ", "_"): each.build() for name, each in FAMILIES.items()})
            self.codes = CodesEmbedding((5, 7), 8)
            heads = (
                CodesHeadConfig(codebook_sizes=(5, 7), width=8),
                MaskedBitsHeadConfig(codebook_sizes=(8, 4), width=8),
            )
            self.heads = nn.ModuleList(each.build() for each in heads)
            self.post_init()

        def results(self) -> list[Tensor]:
            ids, hidden = torch.tensor([[[4, 6], [0, 3]]]) % torch.tensor([5, 4]), torch.ones(1, 2, 8)
            found = [self.codes(ids), *(head.nats(hidden, ids) for head in self.heads)]
            for training in (False, True, False):
                for each in self.train(training).parts.values():
                    out = each(batch(3, each.dim).float())
                    found += [out.vectors, out.ids]
                    if training:
                        each.update(out.stats)
            return [each.detach() for each in found]

    torch.manual_seed(0)
    host = Host(transformers.PretrainedConfig())
    for _ in range(3):
        host.results()  # codebooks start, one stage after the other
    host.save_pretrained(tmp_path)
    with torch.device("meta"):
        copy = Host(transformers.PretrainedConfig())
    copy.to_empty(device="cpu").load_state_dict(host.state_dict())
    loaded, expected = Host.from_pretrained(tmp_path), host.results()
    for each in (copy, loaded):
        torch.testing.assert_close(each.results(), expected, rtol=0, atol=0)


def test_data_parallel_is_told_of_ddp() -> None:
    quantizer = FSQConfig(levels=(8, 5)).build()
    with pytest.raises(ConfigError, match="got an iteration.*vectors, ids and stats.*DistributedDataParallel"):
        gather([quantizer(torch.randn(3, 2)) for _ in range(2)], "cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forgotten_update_is_reported_once(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _warn_missing_update.cache_clear()
    monkeypatch.setattr("vqclip.quantizers.base.MAX_FORWARDS_WITHOUT_UPDATE", 8)
    quantizer = FAMILIES[name].build()
    x = torch.randn(2, quantizer.dim)
    for _ in range(8):
        stats = quantizer(x).stats
    for _ in range(8):
        quantizer.eval()(x)
    quantizer.train().update(stats)
    for _ in range(8):
        quantizer(x)
        with torch.no_grad():  # the first pass of microbatches
            quantizer(x)
    assert not caplog.records
    for _ in range(16):
        quantizer(x)
    told = [each for each in caplog.messages if "without an update" in each]
    assert len(told) == (1 if "vq" in name.replace("simvq", "") or "dropout" in name else 0)
