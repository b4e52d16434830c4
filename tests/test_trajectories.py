"""Random runs: several processes, shards and microbatches train what one process trains, and a killed run goes on.

The configuration of a run is drawn from options that may go together, keyed by its number. More of them:
``VQCLIP_TRAJECTORIES=100-200 pytest -m slow tests/test_trajectories.py``.
"""

import os
import random

import pytest

from tests.models import tiny_model
from tests.training import all_equal, metrics, run, run_tree, run_until, weights

FIRST, LAST = map(int, os.environ.get("VQCLIP_TRAJECTORIES", "0-5").split("-"))
STEPS, MODALITIES = 7, ("image", "text")
ENTROPY = {"token_entropy": 0.1, "codebook_entropy_gap": 0.1, "commitment": 0.25}
TRAINS = ("all", "all", "all", "none", {"last": 1}, {"from_step": 3}, {"lora": {"rank": 2}})
PROJECTIONS = ({"kind": "linear"}, {"kind": "mlp", "dropout": 0.2}, {"kind": "attention", "heads": 2})


def quantizer(draw, depth=0):
    simple, nested = ("fsq", "lfq", "vq", "vq", "simvq", "bsq"), ("residual", "residual", "product")
    kind = draw.choice([(*simple, "identity", *nested), simple + nested, simple][depth])  # stages refine codes
    codebook, busy = {"dim": 6, "codebook_size": 16}, {"decay": 0.8, "dead_below": 0.5}
    made = {
        "fsq": {"levels": draw.choice([[4, 4, 4], [8, 5, 5], [2, 2, 2, 2]]), "layout": "uniform"},
        "lfq": {"bits": 6, "entropy_temperature": 0.1, "loss_weights": ENTROPY},
        "bsq": {"bits": 4, "entropy_temperature": 0.1, "loss_weights": ENTROPY},
        "vq": {**codebook, **busy, "learning": draw.choice(["ema", "gradient", "ibq", "diveq"])},
        "simvq": {**codebook, "blocks": draw.choice([0, 1])},
        "identity": {"dim": 6},
        "residual": {"depth": 2, "dropout": draw.random() < 0.6},
        "product": {"codebooks": 2},
    }[kind]
    return {"kind": kind, **made} | ({"layer": quantizer(draw, depth + 1)} if kind in ("residual", "product") else {})


def changes(draw):
    """Changes of the configuration of a run, as `run_tree` takes them."""
    pick, model = draw.choice, tiny_model(quantizer(draw), quantizer(draw)).model_dump(mode="json")
    for modality in MODALITIES:
        model[modality]["tower"]["train"] = pick(TRAINS)
        model[modality] |= {"depth": pick([0, 1]), "project_in": pick(PROJECTIONS), "project_out": pick(PROJECTIONS)}
        model[modality] |= {"normalize": pick(["none", "layer", "l2"]), "reduce": pick([None, None, {"kind": "mean"}])}
    model["text"]["tower"] |= {"pos_embed": pick(["learned", "rope"]), "units": pick(["byte_pairs", "bytes"])}
    if pick([True, False]):
        decoder = {"kind": "transformer", "width": 8, "heads": 2, "depth": 1, "channels": 3}
        model["image"]["pixels"] = {"decoder": decoder, "start_step": pick([0, 2]), "one_in": pick([1, 3])}
    loss = {"kind": pick(["contrastive", "sigmoid"]), "positives": pick(["sample_id", "caption", None])}
    if loss["kind"] == "sigmoid":
        model["temperature"] = {"init": 10.0, "bias": -10.0}
    return {
        "model": model,
        "loss": loss | {"impl": pick(["tiled", "ring", "gather"])},
        "data__workers": pick([0, 0, 2]),
        "data__order": pick([{"kind": "full"}, {"kind": "windowed", "chunk": 4, "window": 3}]),
        "optim__kind": pick(["adamw", "muon", "lion"]),
        "optim__clip_grad_norm": pick([None, 1.0, 0.1]),
        "train__steps": STEPS,
        "train__checkpoint_every": 3,
        "train__batch_size": pick([8, 11, 12]),
        "train__ema": pick([None, {"decay": 0.9}]),
        "train__bottleneck": pick([None, {"open_steps": 1, "close_steps": 2}]),
        "train__activation_checkpointing": pick([False, True]),
        "train__save_in_background": pick([False, True]),
        "report": None,
    }


def figures(folder):
    """Loss and gradient norm of every step, in one list."""
    return [line[name] for line in metrics(folder) for name in ("loss/total", "grad_norm")]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FIRST, LAST + 1))
def test_processes_shards_microbatches_and_a_kill_change_rounding_at_most(ranks, tmp_path, shards, number):
    draw = random.Random(f"trajectory {number}")
    settings, processes = changes(draw), draw.choice([2, 2, 3])
    model = settings["model"]
    shardable = model["image"]["pixels"] is None and "all" in (model[name]["tower"]["train"] for name in MODALITIES)
    parallel = draw.choice(["ddp", "fsdp"] if shardable else ["ddp"])
    many = settings | {"train__parallel": parallel, "train__micro_batches": draw.choice([1, 2])}

    def train(name, processes, settings, function=run, *first):
        tree = run_tree(tmp_path / name, shards, **settings)
        ranks(processes, function, *first, tree, str(tmp_path / "cache"), init=False)
        return weights(tmp_path / name, STEPS) if function is run else {}

    train("one", 1, settings)
    whole = train("many", processes, many)
    # Not the weights: some have no gradient but rounding, which AdamW and Lion make as large as any other.
    lines = {name: figures(tmp_path / name) for name in ("one", "many")}
    assert lines["many"] == pytest.approx(lines["one"], rel=1e-9)

    train("killed", processes, many, run_until, draw.choice([4, 5, 6]))
    assert all_equal(train("killed", processes, many), whole)
    assert figures(tmp_path / "killed") == lines["many"]
