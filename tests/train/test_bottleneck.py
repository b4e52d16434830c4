"""The embedding begins with continuous vectors and ends with codes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.models import BUSY_VQ, FSQ, LFQ, RESIDUAL_FSQ, tiny_model
from tests.training import all_equal, differences, metrics, run, run_tree, weights
from vqclip.train import TrainConfig
from vqclip.train.config import BottleneckConfig
from vqclip.train.parallel import prepare_compilation

SCHEDULE = BottleneckConfig(open_steps=2, close_steps=3)


def built(quantizer):
    torch.manual_seed(0)
    model = tiny_model(quantizer, quantizer).build()
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    return model, images, model.text.preprocess(["a red star", "two circles", "x", "one of many"])


def test_the_share_is_a_function_of_the_step():
    assert [SCHEDULE.share(step) for step in range(7)] == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert [BottleneckConfig(open_steps=2, close_steps=0).share(step) for step in range(4)] == [0, 0, 1, 1]
    assert BottleneckConfig(open_steps=0, close_steps=0).share(0) == 1


@pytest.mark.parametrize("quantizer", [FSQ, LFQ, BUSY_VQ, RESIDUAL_FSQ], ids=lambda each: each["kind"])
def test_the_embedding_moves_from_continuous_vectors_to_codes(quantizer):
    model, images, texts = built(quantizer)
    plain = model(images, texts)
    for name, inputs in (("image", images), ("text", texts)):
        tokenizer = getattr(model, name)
        with SCHEDULE.at(0, model):
            open_ = tokenizer(inputs)
        assert torch.equal(open_.embedding, tokenizer.continuous(inputs))
        assert torch.equal(open_.ids, getattr(plain, name).ids)
        assert differences(open_.stats, getattr(plain, name).stats) == []
        with SCHEDULE.at(3, model):
            half = tokenizer(inputs).embedding
        with SCHEDULE.at(5, model):
            closed = tokenizer(inputs).embedding
        assert torch.equal(closed, getattr(plain, name).embedding)
        assert not torch.equal(half, closed)
        assert not torch.equal(half, open_.embedding)


def test_evaluation_always_goes_through_the_codes():
    model, images, texts = built(FSQ)
    model.eval()
    plain = model(images, texts)
    with SCHEDULE.at(0, model):
        out, embedded = model(images, texts), model.image.embed(model.image.encode(images))
    assert torch.equal(out.text.embedding, plain.text.embedding)
    assert all(torch.equal(each, plain.image.embedding) for each in (out.image.embedding, embedded))


def test_one_modality_alone_and_after_an_error_none():
    model, images, texts = built(FSQ)
    plain = model(images, texts)
    with BottleneckConfig(open_steps=1, close_steps=0, modalities=("image",)).at(0, model):
        out = model(images, texts)
    assert torch.equal(out.text.embedding, plain.text.embedding)
    assert torch.equal(out.image.embedding, model.image.continuous(images))
    with pytest.raises(ZeroDivisionError), SCHEDULE.at(0, model):
        raise ZeroDivisionError
    assert torch.equal(model(images, texts).image.embedding, plain.image.embedding)
    assert not [name for name in model.state_dict() if "code_share" in name]


def test_a_compiled_model_has_one_graph_for_all_shares():
    model, images, _ = built(FSQ)
    counter = CompileCounter()
    torch._dynamo.reset()
    prepare_compilation([torch.nn.Identity()])  # for einops, see there
    compiled = torch.compile(model.image, backend=counter)
    graphs = []
    for step in range(7):
        with SCHEDULE.at(step, model):
            out, eager = compiled(images), model.image(images)
        assert torch.equal(out.embedding, eager.embedding)
        out.embedding.sum().backward()
        graphs.append(counter.frame_count)
    assert graphs == [1] * 5 + [2] * 2


def test_after_the_ramp_a_run_is_one_without_it(tmp_path, shards):
    """From equal states: a schedule of no steps changes no bit of a run, and a real one changes its beginning."""
    settings = {"none": None, "no steps": (0, 0), "some": (2, 3)}
    for name, steps in settings.items():
        section = steps and {"open_steps": steps[0], "close_steps": steps[1]}
        changes = {"train__steps": 6, "train__precision": "fp32", "train__bottleneck": section}
        every = {"train__checkpoint_every": 1, "train__keep_checkpoints": 6}
        run(run_tree(tmp_path / name, shards, BUSY_VQ, **changes, **every))
    none, empty, some = (weights(tmp_path / name, 6) for name in settings)
    assert all_equal(none, empty)
    assert not all_equal(none, some)
    assert [line["bottleneck/share"] for line in metrics(tmp_path / "some")] == [0, 0, 0.25, 0.5, 0.75, 1]
    assert "bottleneck/share" not in metrics(tmp_path / "none")[0]
    # Codebooks learn while they are bypassed.
    first, second = (weights(tmp_path / "some", step)["image.quantizer.codebook"] for step in (1, 2))
    assert not torch.equal(first, second)


def test_micro_batches_see_the_same_mix(tmp_path, shards):
    lines = []
    for parts in (1, 3):
        changes = {"train__steps": 6, "train__bottleneck": SCHEDULE.model_dump(), "train__micro_batches": parts}
        run(run_tree(tmp_path / str(parts), shards, LFQ, **changes))
        lines.append([line["loss/total"] for line in metrics(tmp_path / str(parts))])
    assert lines[1] == pytest.approx(lines[0], rel=1e-9)


def test_a_run_must_end_with_the_codes(tmp_path, shards):
    tree = run_tree(tmp_path, shards, train__steps=5, train__bottleneck=SCHEDULE.model_dump())
    with pytest.raises(ValueError, match=r"got 5 steps of bottleneck .*; expected fewer than the 5 steps of the run"):
        TrainConfig.model_validate(tree)
