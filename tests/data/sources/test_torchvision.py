import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from tests.data.making import encode, make_files, pixels
from vqclip.data import RawSample, decode_image
from vqclip.data.sources import torchvision as module
from vqclip.data.sources.torchvision import TorchvisionConfig
from vqclip.errors import DataError, VqclipError

TWELVE = {"size": 12, "image_size": (3, 16, 20), "num_classes": 2}
FAKE = {"name": "FakeData", "arguments": TWELVE, "classnames": ("cat", "dog")}


def refusal(**options) -> str:
    with pytest.raises(VqclipError) as error:
        TorchvisionConfig(**options).build().read(0)
    return str(error.value)


def test_fake_data() -> None:
    source = TorchvisionConfig(**FAKE).build()
    expected = torchvision.datasets.FakeData(size=12, image_size=(3, 16, 20), num_classes=2)
    assert len(source) == 12
    for index in (11, 0, 5):
        image, label = expected[index]
        sample = source.read(index)
        assert np.array_equal(decode_image(sample.image).permute(1, 2, 0).numpy(), np.asarray(image))
        assert (sample.label, sample.captions) == (label, (f"a photo of a {('cat', 'dog')[label]}",))
    assert source.name(3) == "torchvision FakeData: row 3"
    other = {**FAKE, "arguments": {**TWELVE, "random_offset": 5}}
    assert source.fingerprint != TorchvisionConfig(**other).build().fingerprint


def test_files_keep_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that links lead to, of a relative root."""
    for number in range(6):
        make_files(tmp_path / "away", f"{('cat', 'dog')[number % 2]}/{number}.jpg", encode(pixels(number)))
    (tmp_path / "root").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "root" / name).symlink_to(tmp_path / "away" / name)
    monkeypatch.chdir(tmp_path)
    config = TorchvisionConfig(name="ImageFolder", root=Path("root"))
    source = config.build()
    assert source.classnames == ("cat", "dog")
    assert source.read(4) == RawSample(encode(pixels(3)), ("a photo of a dog",), 1)
    before = source.fingerprint
    os.utime(tmp_path / "away" / "dog" / "3.jpg", ns=(1, 1))
    assert config.build().fingerprint == before
    (tmp_path / "away" / "dog" / "3.jpg").write_bytes(encode(pixels(7)))
    assert config.build().fingerprint != before


def test_files_outside_of_the_root_count(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir()
    (root / "1.jpg").write_bytes(encode(pixels(1)))
    listing = tmp_path / "captions.token"
    listing.write_text("1.jpg#0\tone\n")
    config = TorchvisionConfig(name="Flickr30k", root=root, arguments={"ann_file": str(listing)})
    before = config.build().fingerprint
    listing.write_text("1.jpg#0\tother\n")
    source = config.build()
    assert source.read(0).captions == ("other",)
    assert source.fingerprint != before
    assert "classnames: set, and the samples of Flickr30k have no class numbers" in refusal(
        **config.model_dump(exclude_defaults=True), classnames=("a",)
    )


def test_pickles_are_read_only_if_allowed(tmp_path: Path) -> None:
    make_files(tmp_path, "cifar-10-batches-py/data_batch_1", pickle.dumps({"data": 1}))
    options = {"name": "CIFAR10", "root": tmp_path}
    assert "pickles: false; the files of CIFAR10 are Python pickles, which can run code" in refusal(**options)
    assert "missing or damaged" in refusal(**options, pickles=True)  # their sums are compared first


def test_no_other_data_set_reads_pickles() -> None:
    """In the installed torchvision."""
    unsafe = re.compile(r"pickle\.load|torch\.load\((?![^)]*\)?,\s*weights_only=True)|allow_pickle=True")
    folder = Path(torchvision.datasets.__file__).parent
    found = {path.name for path in folder.rglob("*.py") if unsafe.search(path.read_text())}
    assert found - {"mnist.py", "imagenet.py", "phototour.py"} == {"cifar.py", "lsun.py"}
    for name in ("mnist.py", "imagenet.py", "phototour.py"):
        lines = [line for line in (folder / name).read_text().splitlines() if "torch.load(" in line]
        assert all("weights_only=True" in line for line in lines)
    assert {*module._PICKLED, *module._REFUSED} == {"CIFAR10", "CIFAR100", "LSUN", "LSUNClass"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "CIFAR11"}, "name: got 'CIFAR11'; expected a data set of torchvision: .*did you mean .CIFAR10"),
        ({"name": "LSUN"}, "name: got 'LSUN', whose Python pickle nothing is compared with"),
        ({"name": "wrap_dataset_for_transforms_v2"}, "name: got"),
        ({"name": "MNIST"}, "arguments: MNIST: missing a required argument: 'root'; expected root"),
        ({"name": "MNIST", "root": "none"}, "got none, where files of MNIST are missing or damaged; set download"),
        ({"name": "MNIST", "root": "x", "arguments": {"trian": 1}}, "argument 'trian'; .*did you mean .train"),
        ({"name": "EMNIST", "root": "x", "arguments": {"split": "letters", "trian": 1}}, "'trian'; .*did you .*train"),
        ({"name": "FakeData", "arguments": {"transform": "x"}}, "'transform' is a function, which cannot be set"),
        ({"name": "FakeData", "root": "x"}, "arguments: FakeData: .* argument 'root'; expected size"),
        ({"name": "FakeData", "arguments": {"size": 3}}, "classnames: missing; FakeData does not have the names"),
        ({"name": "FakeData", "arguments": {"size": 0}}, "torchvision FakeData: has no rows"),
        ({**FAKE, "classnames": ("cat",), "arguments": {"size": 9, "num_classes": 5}}, "a class number, 0 to 0"),
        ({**FAKE, "templates": ("x",)}, "expected prompts with {c}"),
    ],
)
def test_mistakes(options: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((VqclipError, ValueError), match=message):
        TorchvisionConfig(**options).build().read(0)


def test_samples_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for item, message in (
        ((1, 2, 3), "its samples are int, int, int; expected an image, and a class number or captions"),
        ((Image.new("RGB", (8, 8)), {"x": 1}), "its target is a dict; expected a class number or captions"),
    ):
        monkeypatch.setattr(torchvision.datasets.FakeData, "__getitem__", lambda data, index, item=item: item)
        with pytest.raises(DataError, match=message):
            TorchvisionConfig(**{**FAKE, "classnames": ()}).build()


def test_an_image_of_another_type_is_a_bad_sample() -> None:
    stream = TorchvisionConfig(**FAKE).find().open()
    stream._source._samples = [(torch.zeros(3, 4, 4), 0)] * 12
    error = next(stream.read(0)).sample
    assert "FakeData: row 0: image is torch.float32" in str(error)
