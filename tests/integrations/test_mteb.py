"""mteb's own classes give the figures of `vqclip evaluate`, on tasks made of real data without a network."""

import json
import os
from pathlib import Path

import pytest
import torch

from vqclip.cli.main import main
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, open_source
from vqclip.errors import ConfigError, NonFiniteError
from vqclip.evaluation import RetrievalConfig, ZeroShotConfig, evaluate
from vqclip.integrations.mteb import load
from vqclip.model import CLIP

mteb = pytest.importorskip("mteb", reason="pip install 'vqclip[mteb]'")
if not os.environ.get("VQCLIP_DATA"):
    pytest.skip("VQCLIP_DATA names no folder of real data", allow_module_level=True)

from datasets import Dataset, DatasetDict, Image  # noqa: E402
from mteb.abstasks.retrieval import AbsTaskRetrieval  # noqa: E402
from mteb.abstasks.zeroshot_classification import AbsTaskZeroShotClassification  # noqa: E402

DATA = Path(os.environ["VQCLIP_DATA"])
EUROSAT = ClassShardsConfig(path=DATA / "cls_eurosat", split="test")
EMOJI = CaptionShardsConfig(path=str(DATA / "captions_noto_emoji" / "val"))
MODES = ("continuous", "codes_only")
BATCH, TEMPLATE = 50, "a satellite image of {c}"


def metadata(kind, category, main_score, modalities=("image", "text")):
    return mteb.TaskMetadata(
        name=f"Local{kind}{category}",
        description="Local data.",
        dataset={"path": "local", "revision": "1"},
        type=kind,
        category=category,
        modalities=[*modalities],
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )


def labelled(config):
    source = open_source(config)
    samples = [source.read(index) for index in range(len(source))]
    columns = {"image": [{"bytes": each.image, "path": None} for each in samples], "label": [s.label for s in samples]}
    return Dataset.from_dict(columns).cast_column("image", Image()), source.classnames


class ZeroShot(AbsTaskZeroShotClassification):
    metadata = metadata("ZeroShotClassification", "i2t", "accuracy")

    def load_data(self, *args, **options):
        images, self.names = labelled(EUROSAT)
        self.dataset, self.data_loaded = DatasetDict(test=images), True

    def get_candidate_labels(self):
        return [TEMPLATE.replace("{c}", name) for name in self.names]


class Retrieval(AbsTaskRetrieval):
    def load_data(self, *args, **options):
        source = open_source(EMOJI)
        samples = [source.read(index) for index in range(len(source))]
        ids = [f"{index:05d}" for index in range(len(samples))]
        images = Dataset.from_dict({"id": ids, "image": [{"bytes": each.image, "path": None} for each in samples]})
        texts = Dataset.from_dict({"id": ids, "text": [each.captions[0] for each in samples]})
        sides = {"i": images.cast_column("image", Image()), "t": texts}
        query, _, corpus = self.metadata.category
        split = {"queries": sides[query], "corpus": sides[corpus], "top_ranked": None}
        split["relevant_docs"] = {name: {name: 1} for name in ids}
        self.dataset, self.data_loaded = {"default": {"test": split}}, True


class ImageToText(Retrieval):
    metadata = metadata("Any2AnyRetrieval", "i2t", "recall_at_1")


class TextToImage(Retrieval):
    metadata = metadata("Any2AnyRetrieval", "t2i", "recall_at_1")


def theirs(run, mode, task):
    found = mteb.evaluate(load(run, mode=mode, device="cpu"), task, cache=None, encode_kwargs={"batch_size": BATCH})
    [scores] = found.task_results[0].scores["test"]
    return scores


def ours(run, config):
    [result] = evaluate(CLIP.from_pretrained(run / "tokenizer"), [config])
    return result.figures


def test_zero_shot_classification(run):
    figures = ours(run, ZeroShotConfig(data=EUROSAT, templates=[TEMPLATE], batch_size=BATCH))
    for mode in MODES:
        scores = theirs(run, mode, ZeroShot())
        assert scores["accuracy"] == figures[mode]["top1"]
        assert scores["recall"] == pytest.approx(figures[mode]["mean_per_class"], abs=1e-15)
    assert figures["continuous"]["top1"] != figures["codes_only"]["top1"]


def test_retrieval_of_images_and_of_texts(run):
    figures = ours(run, RetrievalConfig(data=EMOJI, batch_size=BATCH))
    for mode in MODES:
        for name, task in (("i2t", ImageToText()), ("t2i", TextToImage())):
            scores = theirs(run, mode, task)
            for k in (1, 5, 10):
                assert scores[f"recall_at_{k}"] == scores[f"hit_rate_at_{k}"] == round(figures[mode][f"{name}_r{k}"], 5)
    assert figures["codes_only"]["i2t_r10"] > 0


def test_the_metadata_is_filled_from_the_folder(run, tmp_path):
    model = load(run, device="cpu")
    meta = model.mteb_model_meta
    assert isinstance(model, mteb.EncoderProtocol)
    assert (meta.name, meta.modalities, meta.embed_dim, meta.max_tokens) == ("vqclip/tiny", ["image", "text"], 16, 12)
    assert meta.n_parameters == sum(each.numel() for each in CLIP.from_pretrained(run / "tokenizer").parameters())
    settings = {"mode": "codes_only", "precision": "fp32", "weights": "averaged"}
    assert (meta.experiment_kwargs, meta.license) == (settings, None)
    again = meta.load_model(device="cpu")
    assert again.mteb_model_meta.revision == meta.revision == load(run / "tokenizer").mteb_model_meta.revision
    clip = CLIP.from_pretrained(run / "tokenizer")
    torch.nn.init.normal_(next(clip.text.parameters()))
    clip.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "README.md").write_text("---\nlicense: apache-2.0\n---\nlicense: mit\n")
    other = load(tmp_path / "other", mode="continuous", precision="bf16").mteb_model_meta
    assert other.license == "apache-2.0"
    assert other.experiment_kwargs == {"mode": "continuous", "precision": "bf16", "weights": "averaged"}
    assert other.revision != meta.revision
    with pytest.raises(ConfigError, match=f"got weights of revision {meta.revision}, expected abc"):
        load(run, revision="abc")


def test_pairs_and_images_alone(run, tmp_path):
    model, clip = load(run, device="cpu"), CLIP.from_pretrained(run / "tokenizer")
    data, _ = labelled(EUROSAT)
    images, texts = [data[0]["image"], data[1]["image"]], ["a road", "a river"]
    both = model.encode([{"image": images, "text": texts}])
    each = [model.encode([{"image": images}]), model.encode([{"text": texts}])]
    assert torch.equal(both, torch.nn.functional.normalize(each[0] + each[1], dim=-1))
    assert torch.allclose(model.similarity(*each).diagonal(), model.similarity_pairwise(*each))
    clip.image.save_pretrained(tmp_path / "image")
    alone = load(tmp_path / "image", mode="continuous", device="cpu")
    assert alone.mteb_model_meta.modalities == ["image"]
    assert torch.equal(alone.encode([{"image": images}]), load(run, mode="continuous").encode([{"image": images}]))
    with pytest.raises(ConfigError, match="got inputs of modality text, and the folder contains a tokenizer of image"):
        alone.encode([{"text": texts}])


def test_embeddings_that_are_not_finite_are_refused(run):
    model = load(run, mode="continuous", device="cpu")
    with torch.no_grad():
        next(model.tokenizers["text"].parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="vqclip/tiny: embeddings are NaN or infinite"):
        model.encode([{"text": ["a"]}])


def test_the_command(run, tmp_path, monkeypatch, capsys, refused):
    clip = CLIP.from_pretrained(run / "tokenizer")
    clip.image.save_pretrained(tmp_path / "image")
    tasks = {"Zero": ZeroShot(), "I2T": ImageToText()}
    monkeypatch.setattr(mteb, "get_task", tasks.__getitem__)
    given = ["evaluate", "mteb", str(run), "--tasks", *tasks, "--batch-size", str(BATCH), "--device", "cpu"]
    given += ["--out", str(tmp_path / "results")]
    assert main(given) == 0
    shown = capsys.readouterr().out.splitlines()
    figures = ours(run, ZeroShotConfig(data=EUROSAT, templates=[TEMPLATE], batch_size=BATCH))
    assert shown[0] == f"model: {run}"
    expected = ["LocalZeroShotClassificationi2t", "accuracy", *(f"{figures[mode]['top1']:.5f}" for mode in MODES)]
    assert shown[4].split() == expected
    files = sorted((tmp_path / "results").rglob("LocalZeroShot*.json"))
    stored = [json.loads(each.read_text())["scores"]["test"][0]["accuracy"] for each in files]
    assert sorted(stored) == sorted(figures[mode]["top1"] for mode in MODES)
    monkeypatch.setattr("vqclip.integrations.mteb.MtebModel.encode", None)  # results are not computed again
    assert main(given) == 0
    assert capsys.readouterr().out.splitlines() == shown
    monkeypatch.undo()
    assert "EuroSATZeroShot" in refused(main(["evaluate", "mteb", str(run), "--tasks", "EuroSATZeroShott"]))
    given = ["evaluate", "mteb", str(tmp_path / "image"), "--tasks", "EuroSATZeroShot", *given[-2:]]
    assert "vqclip/image" in refused(main(given))
