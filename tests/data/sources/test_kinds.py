from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.data.making import caption_shards, class_folder, encode, make_files, pixels
from vqclip.config import Config, load_config, to_yaml
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, DataConfig, FolderConfig, SourceConfig, parse_source
from vqclip.errors import ConfigError, DataError
from vqclip.evaluation import CaptionedData, LabelledData


def test_the_kind_of_a_path(tmp_path: Path) -> None:
    shards = caption_shards(tmp_path / "shards", (1, 1))
    classes = class_folder(tmp_path / "classes")
    make_files(tmp_path, "images/cat/1.jpg", encode(pixels(1)))
    for path, expected in (
        (shards, CaptionShardsConfig),
        (shards / "00000.tar", CaptionShardsConfig),
        (f"{shards}/{{00000..00001}}.tar", CaptionShardsConfig),
        (f"{shards}/*.tar", CaptionShardsConfig),
        ("https://host/{0..3}.tar?key=x", CaptionShardsConfig),
        (classes, ClassShardsConfig),
        (tmp_path / "images", FolderConfig),
    ):
        assert isinstance(parse_source(path), expected), path
        assert isinstance(TypeAdapter(SourceConfig).validate_python({"path": str(path)}), expected), path
    tars = (str(shards / "00000.tar"), str(shards / "00001.tar"))
    both = parse_source([*tars], ["captions=json"], json_keys=["many"])
    assert both == CaptionShardsConfig(path=tars, captions="json", json_keys=("many",))


def test_a_kind_that_is_not_plain(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_files(tmp_path, "notes.doc zip/images.zip sheets/a.xlsx sheets/b.csv both/0.tar both/a.png both/a.txt")
    for path, message in (
        (tmp_path / "empty", "the folder is empty"),
        (tmp_path / "both", "could be of several kinds: shards, folder; name one"),
        (tmp_path / "none", "no such file or folder"),
        ("images/*.jpg", "an image, or a pattern of images; expected their folder"),
        (tmp_path / "zip", "images.zip: an archive of a kind that is not read; unpack it"),
        (tmp_path / "sheets", "tables; one of them is the path: .*/sheets/b.csv"),
        (tmp_path / "sheets" / "a.xlsx", "a.xlsx: a spreadsheet, which is not read; save it as CSV"),
        (tmp_path / "zip" / "images.zip", "an archive of a kind that is not read; unpack it, and name the folder"),
        (
            tmp_path,
            r"its kind is not plain from its contents \(both/, empty/, notes.doc, sheets/, zip/\); name it, kind: one "
            r"of shards, .*; or name the path of one with tars or Parquet in it: both",
        ),
        (tmp_path / "notes.doc", "not plain from its name; .*plain are folders, and names that end in .tar"),
        ("s3://bucket/data.bin", "its kind is not plain from its name"),
    ):
        with pytest.raises(DataError, match=message):
            parse_source(path)
        with pytest.raises(ValidationError, match=message):
            TypeAdapter(SourceConfig).validate_python({"path": str(path)})


@pytest.mark.parametrize("ending", [".csv", ".json", ".parquet", ".tar", ""])
def test_paths_of_no_file(tmp_path: Path, ending: str) -> None:
    for path in (f"{tmp_path}/a\0{ending}", f"{tmp_path}/{'a' * 5000}{ending}", f"~nobody-of-this-name/a{ending}"):
        with pytest.raises(DataError, match="(cannot be read|no such file)"):
            parse_source(path).build()


def test_wrong_keys_and_kinds(tmp_path: Path) -> None:
    for overrides, message in (
        (["kind=shard"], "kind: got 'shard'; expected one of shards, .*did you mean \"shards\""),
        (["kind=shards", "caption=txt"], 'caption: unknown key; did you mean "captions"'),
        (["kind=shards", "captions=x"], r"captions: got 'x' \(str\); expected one of"),
        (["kind=shards", "captions"], "expected section.key=value"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_source(tmp_path, overrides)


def test_a_kind_without_a_path(tmp_path: Path) -> None:
    source = parse_source("kind=torchvision", ["name=Flowers102", f"root={tmp_path}"])
    assert (source.kind, source.name) == ("torchvision", "Flowers102")
    assert parse_source([], ["kind=scenes", "split=val"]).split == "val"
    with pytest.raises(ConfigError, match="got name=CIFAR10; expected a path, or kind=KIND"):
        parse_source("name=CIFAR10")
    with pytest.raises(ConfigError, match="path: missing"):
        parse_source("kind=csv")
    (tmp_path / "kind=csv").touch()
    assert parse_source(str(tmp_path / "kind=csv"), ["kind=csv"]).path == str(tmp_path / "kind=csv")


def test_a_word_in_place_of_a_section_is_a_path(tmp_path: Path) -> None:
    shards = str(caption_shards(tmp_path / "shards", (1,)))
    for sources in (shards, [shards], {"path": shards}, [{"path": shards}]):
        (source,) = load_config(DataConfig, {"sources": sources}).sources
        assert (source.kind, source.path) == ("shards", shards)
    with pytest.raises(ConfigError, match="sources.*nothing: no such file or folder"):
        load_config(DataConfig, {"sources": "nothing"})


def test_splits_and_weights_of_training_and_evaluation(tmp_path: Path) -> None:
    section = {"kind": "classes", "path": "a"}
    (source,) = DataConfig.model_validate({"sources": [section]}).sources
    assert (source.split, source.weight) == ("train", None)
    assert DataConfig.model_validate({"sources": [{**section, "weight": 2.0}]}).sources[0].weight == 2
    assert DataConfig.model_validate({"sources": [{"kind": "scenes"}]}).sources[0].split == "train"
    assert TypeAdapter(LabelledData).validate_python(section).split == "test"
    assert TypeAdapter(CaptionedData).validate_python({"kind": "scenes"}).split == "val"
    assert len(parse_source(class_folder(tmp_path / "one")).build()) == 6  # its only split
    class_folder(tmp_path / "one", split="test")
    with pytest.raises(ConfigError, match="split: missing; expected one of those in .*: 'test', 'train'"):
        parse_source(tmp_path / "one").build()


@pytest.mark.parametrize(
    ("schema", "section", "message"),
    [
        (LabelledData, {"kind": "shards", "path": "a"}, "kind shards has captions, not classes"),
        (LabelledData, {"kind": "shards", "path": "caf\udce9"}, r"caf\\udce9: kind shards has captions, not classes"),
        (CaptionedData, {"kind": "classes", "path": "a"}, "kind classes with split test has classes, not captions"),
        (LabelledData, {"kind": "classes", "path": "a", "weight": 2.0}, "weight: got 2 in evaluation"),
    ],
)
def test_data_that_do_not_fit_an_evaluation(schema, section: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(schema).validate_python(section)


def test_the_written_configuration_names_the_kind(tmp_path: Path) -> None:
    class Tree(Config):
        data: DataConfig
        labelled: LabelledData

    shards, classes = caption_shards(tmp_path / "s", (1,)), class_folder(tmp_path / "c")
    tree = load_config(Tree, None, [f"data.sources=[{{path: {shards}}}]", f"labelled={{path: {classes}}}"])
    text = to_yaml(tree)
    assert "kind: shards" in text
    assert "split: test" in text
    (tmp_path / "tree.yaml").write_text(text)
    assert load_config(Tree, tmp_path / "tree.yaml") == tree
