"""Terms of the loss that follow frozen teachers."""

import dataclasses
import shutil

import open_clip
import pytest
import torch
import torch.nn.functional as F

from tests.models import FSQ, tiny_model
from tests.open_clip_models import save_open_clip
from tests.towers.transformers_models import make_image
from tests.train.test_grad_cache import assert_alike, batch_number
from tests.training import all_equal, contrastive_step, largest_difference, metrics, run, run_tree, weights
from vqclip.errors import ConfigError, OtherRunError
from vqclip.losses import ContrastiveConfig, DistillationLoss
from vqclip.model import CLIP
from vqclip.train import TrainConfig
from vqclip.train.distillation import Distillation, fixed_map
from vqclip.train.teachers import resize

CAPTIONS = tuple(f"a {word} thing" for word in ["red", "blue", "small", "large", "round", "old"] * 2)
DATA = {"data": {"sources": [{"kind": "shards", "path": "x"}]}, "loss": {"kind": "contrastive"}}


WIDE = {"image__tower__image_size": 32, "image__tower__args__embed_dim": 24, "image__tower__args__patch_size": 16}
WIDE |= {"text__tower__width": 24}
"""As many tokens, but of another size and width."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Teachers: of the student's sizes, and of others."""
    found = {}
    for number, (name, config) in enumerate({"same": tiny_model(), "wide": tiny_model(**WIDE)}.items()):
        torch.manual_seed(20 + number)
        found[name] = str(tmp_path_factory.mktemp("teachers") / name)
        config.build().save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    torch.manual_seed(9)
    tower = tiny_model().image.tower.build()
    path = tmp_path_factory.mktemp("weights") / "tower.pt"
    torch.save(tower.backbone.model.state_dict(), path)
    return str(path)


def term(kind, folder, **others):
    return {"kind": kind, "teacher": {"kind": "vqclip", "folder": folder}, **others}


def configured(*terms, model=None):
    tree = DATA | {"model": (model or tiny_model()).model_dump(mode="json"), "distillation": list(terms)}
    return TrainConfig.model_validate(tree)


def build_step(terms, micro_batches=1, model=None):
    torch.manual_seed(0)
    config = configured(*terms, model=model)
    student = config.model.build().double()
    distillation = Distillation(config.distillation, student, seed=3)
    return student, contrastive_step(student, None, distillation, precision="fp64", micro_batches=micro_batches)


def captioned(number, model):
    batch = batch_number(number, model)
    return dataclasses.replace(batch, texts=model.text.preprocess(CAPTIONS), captions=CAPTIONS)


def every_kind(folders):
    images = term("embeddings", folders["wide"], weight=0.5), term("image_features", folders["wide"], weight=2.0)
    return [*images, term("text_features", folders["same"])]


def test_equals_a_plain_reference(folders):
    """Loss and gradients beside a few lines of torch, with a teacher of another size and width."""
    student, step = build_step(every_kind(folders))
    batch = captioned(0, student)
    reference, _ = build_step([])
    teacher = CLIP.from_pretrained(folders["wide"]).double()
    same = CLIP.from_pretrained(folders["same"]).double()
    needed = student.text.needed_tokens(batch.texts)
    tokens = batch.texts[:, :needed]
    out = reference(batch.images, tokens)
    with torch.no_grad():
        pixels = F.interpolate(batch.images.double() / 255, (32, 32), mode="bicubic", antialias=True).clamp(0, 1)
        wanted = teacher.image.continuous(pixels), teacher.text.continuous(batch.texts)
        patches, words = teacher.image.tower(pixels), same.text.tower(tokens)
    embedded = out.image.embedding, out.text.embedding, out.scale
    embeddings = DistillationLoss("gather")(*embedded, *wanted, teacher.logit_scale.exp())
    matrix = step.task.distillation.terms["image_features"].map
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    image = (1 - F.cosine_similarity(reference.image.tower(batch.images), patches @ matrix.T, dim=-1)).mean()
    mask = reference.text.mask(tokens)
    text = (1 - F.cosine_similarity(reference.text.tower(tokens), words, dim=-1))[mask].mean()
    contrastive = ContrastiveConfig(impl="gather", positives=None).build()(*embedded)
    (contrastive + 0.5 * embeddings + 2.0 * image + text).backward()

    result = step(batch, 0)
    found = {name.removeprefix("distillation/"): float(value) for name, value in result.terms.items()}
    for name, term in (("embeddings", embeddings), ("image_features", image), ("text_features", text)):
        assert found[name] == pytest.approx(term.item(), rel=1e-12)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_alike(({name: p.grad for name, p in student.named_parameters()},), (expected,), 1e-10)


def test_micro_batches_give_the_gradient_of_the_whole_batch(folders):
    outcomes = []
    for micro_batches in (1, 4):
        student, step = build_step(every_kind(folders), micro_batches)
        for number in range(2):
            result = step(captioned(number, student), number)
        outcomes.append(({n: p.grad for n, p in student.named_parameters()}, dict(student.state_dict()), result.terms))
    assert_alike(*outcomes, 1e-10)


def test_a_term_ends_at_its_step(folders):
    terms = [term(kind, folders["same"], until_step=1) for kind in ("image_features", "embeddings")]
    student, step = build_step(terms)
    assert {"distillation/image_features", "distillation/embeddings"} <= step(captioned(0, student), 0).terms.keys()
    assert not any(name.startswith("distillation") for name in step(captioned(1, student), 1).terms)


def test_teachers_get_no_gradient_and_are_not_trained(folders):
    student, step = build_step(every_kind(folders))
    step(captioned(0, student), 0)
    teacher = step.task.distillation.terms["embeddings"].teacher
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())
    assert not teacher.training
    held = {id(parameter) for group in step.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in student.parameters() if parameter.requires_grad}
    assert not any("distillation" in name for name in student.state_dict())


def test_features_of_the_initial_weights_begin_equal(pretrained):
    model = tiny_model(image__tower__checkpoint=pretrained)
    student, step = build_step([{"kind": "image_features", "teacher": {"kind": "initial"}}], model=model)
    first = step(captioned(0, student), 0).terms["distillation/image_features"]
    second = step(captioned(1, student), 1).terms["distillation/image_features"]
    assert abs(float(first)) < 1e-12 < float(second)


def test_codes_of_a_teacher_on_request(folders):
    terms = {}
    for quantized in (False, True):
        config = term("embeddings", folders["same"])
        config["teacher"]["quantized"] = quantized
        student, step = build_step([config])
        terms[quantized] = float(step(captioned(0, student), 0).terms["distillation/embeddings"])
        teacher = step.task.distillation.terms["embeddings"].teacher
        pixels = captioned(0, student).images
        expected = teacher.clip.image.embed(teacher.clip.image.encode(pixels))
        assert torch.equal(teacher.embed_images(pixels), expected) is quantized
    assert terms[False] != terms[True]


def test_a_teacher_of_open_clip(tmp_path):
    theirs, path = save_open_clip(tmp_path, "vqclip-teacher", log_scale=2.5)
    config = {"kind": "embeddings", "teacher": {"kind": "open_clip", "model": "vqclip-teacher", "pretrained": path}}
    features = {"kind": "text_features", "teacher": config["teacher"]}
    student, step = build_step([config, features])
    batch = captioned(0, student)
    result = step(batch, 0)
    teacher = step.task.distillation.terms["embeddings"].teacher
    images, texts = teacher.float()(batch.images, CAPTIONS)
    normalize = teacher.normalize(resize(batch.images, 32, torch.float32))
    with torch.no_grad():
        torch.testing.assert_close(images, theirs.encode_image(normalize, normalize=True))
        tokens = open_clip.get_tokenizer("vqclip-teacher")(list(CAPTIONS))
        torch.testing.assert_close(texts, theirs.encode_text(tokens, normalize=True))
    assert float(teacher.scale) == pytest.approx(12.1825, rel=1e-4)
    assert result.terms["distillation/text_features"].isfinite()


def tree_of(folder, shards, folders, **changes):
    changes = {"train__batch_size": 11, "train__steps": 8, "distillation": every_kind(folders)} | changes
    return run_tree(folder, shards, FSQ, **changes)


@pytest.mark.slow
def test_one_two_and_three_processes_train_the_same_model(ranks, tmp_path, shards, folders):
    outcomes = {}
    for world_size in (1, 2, 3):
        folder = tmp_path / str(world_size)
        tree = tree_of(folder, shards, folders, train__steps=16)
        ranks(world_size, run, tree, init=False)
        outcomes[world_size] = metrics(folder), weights(folder, 16)
    lines, model = outcomes[1]
    for name in ("embeddings", "image_features", "text_features"):
        losses = [line[f"loss/distillation/{name}"] for line in lines]
        assert sum(losses[-4:]) < sum(losses[:4]), name
    for world_size in (2, 3):
        for line, other in zip(lines, outcomes[world_size][0], strict=True):
            for name in (name for name in line if name.startswith("loss/")):
                assert other[name] == pytest.approx(line[name], rel=1e-6), (world_size, name)
        assert largest_difference(model, outcomes[world_size][1]) < 1e-6


def test_a_run_resumes_bit_for_bit_and_only_with_its_teachers(tmp_path, shards, folders):
    changes = {"train__checkpoint_every": 4, "train__precision": "fp32"}
    run(tree_of(tmp_path / "whole", shards, folders, **changes))
    tree = tree_of(tmp_path / "parts", shards, folders, **changes)
    run(tree)
    shutil.rmtree(tmp_path / "parts" / "tiny" / "checkpoints" / "step-00000008")
    other = tree | {"distillation": [term("embeddings", folders["same"], weight=0.5), *tree["distillation"][1:]]}
    with pytest.raises(OtherRunError, match="distillation"):
        run(other)
    assert len(run(tree)["sample_ids"]) == 4
    assert all_equal(weights(tmp_path / "whole", 8), weights(tmp_path / "parts", 8))


def refused(*terms, model=None):
    with pytest.raises(ConfigError) as caught:
        build_step(terms, model=model)
    return str(caught.value)


def test_teachers_that_cannot_be_used_are_refused(tmp_path, folders, pretrained):
    gone = str(tmp_path / "gone")
    assert refused(term("embeddings", gone)).startswith(f"distillation[0]: {gone}: no such folder; expected a folder")
    file = {"kind": "open_clip", "model": "ViT-B-16", "pretrained": gone}
    for kind in ("embeddings", "image_features"):
        text = refused({"kind": kind, "teacher": file})
        assert text.startswith(f"distillation[0].teacher.pretrained: got '{gone}', which is neither a file nor")
    initial = {"kind": "image_features", "teacher": {"kind": "initial"}}
    assert "model.image.tower starts from random weights" in refused(initial)
    make_image(tmp_path / "vit")
    model = tiny_model(image__tower={"kind": "transformers", "name": str(tmp_path / "vit"), "pretrained": False})
    assert "starts from random weights" in refused(initial, model=model)
    model = tiny_model(image__tower__checkpoint=pretrained, image__tower__train="none")
    assert "frozen tower (model.image.tower.train: none)" in refused(initial, model=model)


def test_teachers_with_other_tokens_are_refused(tmp_path, folders):
    fine = tiny_model(image__tower__args__patch_size=4, text__tower__context_length=8)
    fine.build().save_pretrained(tmp_path / "fine")
    text = refused(term("image_features", str(tmp_path / "fine")))
    assert text.startswith("distillation[0].teacher: got 16 patches an image; the student has 4")
    text = refused(term("embeddings", folders["same"]), term("text_features", str(tmp_path / "fine")))
    assert text.startswith("distillation[1].teacher: got a context of 8 tokens; the student has 12; expected at least")


def test_comparison_is_drawn_by_key():
    one, same, other = (fixed_map(8, 12, seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
