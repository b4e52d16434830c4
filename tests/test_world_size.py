"""N processes compute what one computes: the whole training loop, from shards to weights (DESIGN section 1)."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from tests.models import BUSY_RESIDUAL, BUSY_VQ, LFQ, RESIDUAL_FSQ
from tests.training import STEPS, largest_difference, metrics, run, run_tree, weights
from vqclip.train.step import TrainStep

SIGLIP = {"model__temperature": {"init": 10.0, "bias": -10.0}, "loss": {"kind": "sigmoid"}}
# At the default temperature of 0.01 the entropy looks at so few tokens that training itself amplifies rounding by 10^8
# in 20 steps: measured, terms of the entropy then differ by 1.5e-6 on four processes, and the total loss by 1e-9.
ENTROPY_LFQ = LFQ | {
    "entropy_temperature": 0.1,
    "loss_weights": {"token_entropy": 0.1, "codebook_entropy_gap": 0.1, "commitment": 0.25},
}

HEAD = {"kind": "mlp", "dropout": 0.3, "input_dropout": 0.1}
CASES = {
    "lfq, gathered sigmoid loss": (ENTROPY_LFQ, SIGLIP | {"loss": {"kind": "sigmoid", "impl": "gather"}}),
    "residual of vq with dropout": (
        BUSY_RESIDUAL,
        {
            "model__image__project_in": {"kind": "mlp", "dropout": 0.2},
            "model__image__tower__patch_dropout": 0.25,
            "model__text__tower__pos_embed": "rope",
            "model__text__tower__qk_norm": True,
        },
    ),
    "ranks of unequal share": (ENTROPY_LFQ, {"train__batch_size": 11}),
    "small heads on stored views": (
        RESIDUAL_FSQ,
        {
            "model__image__tower__train": "none",
            "model__image__tower__inner_layers": [0],
            "model__image__project_in": HEAD,
            "model__text__project_in": HEAD,
            "loss__label_smoothing": 0.1,
            "data__views": 3,
            "data__feature_cache": {"dtype": "fp32"},
            "train__ema": {"decay": 0.9},
        },
    ),
}
SLOW = ("ranks of unequal share", "small heads on stored views")
"""Not run by default: `tests/quantizers` and `tests/losses` have ranks of unequal share, another case has dropout."""


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_one_two_and_four_processes_train_the_same_model(ranks, tmp_path, shards, case):
    quantizer, changes = CASES[case]
    outcomes = {}
    for world_size in (1, 2, 4):
        folder = tmp_path / str(world_size)
        tree = run_tree(folder, shards, quantizer, **changes)
        parts = ranks(world_size, run, tree, str(tmp_path / "cache"), init=False)
        batches = [sorted(itertools.chain(*step)) for step in zip(*(part["sample_ids"] for part in parts), strict=True)]
        outcomes[world_size] = (batches, metrics(folder), weights(folder))
    batches, lines, model = outcomes[1]
    assert len(batches) == len(lines) == STEPS
    assert lines[-1]["loss/total"] < lines[0]["loss/total"]
    for world_size in (2, 4):
        other_batches, other_lines, other_model = outcomes[world_size]
        assert other_batches == batches
        for line, other in zip(lines, other_lines, strict=True):
            for name in (name for name in line if name.startswith(("loss/", "grad_norm", "temperature/", "image/"))):
                assert other[name] == pytest.approx(line[name], rel=1e-6), (world_size, line["step"], name)
        assert largest_difference(model, other_model) < 1e-6


def codes_at_evaluation(tree, cache):
    """This rank's codebooks whenever the loop evaluates, and right before it made ranks agree."""
    shown, apart, agree = [], [], TrainStep.broadcast_local_codebooks

    def codes(step):
        return [q.codes().detach().clone() for q in step.model.quantizers().values()]

    def agreeing(step):
        apart.append(codes(step))
        agree(step)
        shown.append(codes(step))

    with mock.patch.object(TrainStep, "broadcast_local_codebooks", agreeing):
        run(tree, cache)
    return shown, apart


def test_without_synchronisation_ranks_agree_for_checkpoints_and_evaluations(ranks, tmp_path, shards):
    """They would else share an evaluation out among different models, and go on from rank 0's after a stop only."""
    quantizer = BUSY_VQ | {"sync_codebook": False}
    tree = run_tree(tmp_path, shards, quantizer, train__evaluate_every=8, train__checkpoint_every=7)
    (shown, apart), (also_shown, also_apart) = ranks(2, codes_at_evaluation, tree, str(tmp_path / "cache"), init=False)
    assert len(shown) == 2 + 3 + 1  # evaluations after 8, 16 and 20 steps, checkpoints after 7, 14 and 20
    for mine, theirs in zip(itertools.chain(*shown), itertools.chain(*also_shown), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(apart[0][0], also_apart[0][0])
