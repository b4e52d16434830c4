"""Source of the data sets of torchvision."""

from __future__ import annotations

import difflib
import inspect
import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from vqclip.config import did_you_mean
from vqclip.data.lookup import name_errors
from vqclip.data.sources.base import RawSample, name_sample, read_image
from vqclip.data.sources.columns import find_texts, require_usable
from vqclip.data.sources.listing import checksum
from vqclip.data.sources.packed import Packable, PackedConfig, SourceStream, stamp
from vqclip.errors import ConfigError, DataError
from vqclip.io.files import expand_home, walk_files

_PICKLED = ("CIFAR10", "CIFAR100")
"""Read Python pickles, after comparing their MD5 sums with those in torchvision."""
_REFUSED = ("LSUN", "LSUNClass")
"""Read a pickle that nothing is compared with."""
_FUNCTIONS = ("transform", "target_transform", "transforms", "loader", "is_valid_file")
_UNREADABLE = ": cannot be read by torchvision"
_PIECE_ROWS = 2000
"""Samples of a piece."""
Argument = str | int | float | bool | None | tuple[str | int | float, ...]


class TorchvisionConfig(PackedConfig):
    """A data set of `torchvision.datasets` whose samples are an image, and a class number or captions.

    The samples are packed once into tars in the cache.
    """

    kind: Literal["torchvision"] = "torchvision"
    """Data set of torchvision."""
    name: str
    """Its class, such as CIFAR10, Flowers102 or Flickr30k."""
    root: Path | None = None
    """Folder of its files; null for one that needs none."""
    arguments: dict[str, Argument] = Field(default_factory=dict)
    """Other arguments of the class, such as {split: test}, {train: false}, {annFile: captions.json}."""
    download: bool = False
    """Let torchvision download missing files."""
    pickles: bool = False
    """Read CIFAR10 or CIFAR100, whose files are Python pickles and can run code. torchvision compares their MD5 sums
    with those of the original files before it reads them."""
    classnames: tuple[str, ...] = ()
    """Names of the classes; may be left out if the data set has them."""

    def find(self, known: Mapping[str, Any] | None = None) -> Packable:
        """Open the data set; see `PackedConfig.find`.

        Raises:
            ConfigError: an unknown class or argument, or pickles that are not allowed.
            DataError: its files are missing, or its samples are not images with a class number or captions.
        """
        source = TorchvisionSource(self)
        return Packable(
            source.fingerprint, partial(SourceStream, source, source.data, _PIECE_ROWS, source.sample_bytes)
        )


def _find_class(config: TorchvisionConfig) -> type:
    from torchvision import datasets

    found = {name: getattr(datasets, name) for name in datasets.__all__ if name not in _REFUSED}
    found = {name: each for name, each in found.items() if isinstance(each, type) and hasattr(each, "__getitem__")}
    names = [name for name, each in found.items() if issubclass(each, torch.utils.data.Dataset)]
    if config.name in _REFUSED:
        raise ConfigError(
            f"name: got {config.name!r}, whose Python pickle nothing is compared with; expected its images as files, "
            "such as kind: folder"
        )
    if config.name not in names:
        close = did_you_mean(difflib.get_close_matches(config.name[:80], names, n=1))
        raise ConfigError(f"name: got {config.name!r}; expected a data set of torchvision: {', '.join(names)}{close}")
    if config.name in _PICKLED and not config.pickles:
        raise ConfigError(
            f"pickles: false; the files of {config.name} are Python pickles, which can run code when they are read. "
            "torchvision compares their MD5 sums first; set pickles: true to rely on that"
        )
    return found[config.name]


def _arguments(config: TorchvisionConfig, found: type) -> dict[str, Any]:
    """Return the arguments of the class; raise ConfigError for those that it does not have, or that it needs."""
    given: dict[str, Any] = {key: list(v) if isinstance(v, tuple) else v for key, v in config.arguments.items()}
    given |= {} if config.root is None else {"root": str(expand_home(config.root))}
    given |= {"download": True} if config.download else {}
    parameters: dict[str, inspect.Parameter] = {}  # those of its bases too, where it passes others on
    for each in found.__mro__:
        own = inspect.signature(each).parameters
        parameters = {**own, **parameters}
        if "kwargs" not in own:
            break
    allowed = [name for name in parameters if name not in (*_FUNCTIONS, "kwargs")]
    unknown = next((name for name in given if name not in allowed), "")
    try:
        if unknown:
            raise TypeError(
                f"{unknown!r} is a function, which cannot be set"
                if unknown in _FUNCTIONS
                else f"got an unexpected keyword argument {unknown!r}"
            )
        inspect.signature(found).bind(**given)
    except TypeError as error:
        close = did_you_mean(difflib.get_close_matches(unknown[:80], allowed, n=1))
        raise ConfigError(
            f"arguments: {config.name}: {error}; expected {', '.join(allowed) or 'none'} (root and download are keys "
            f"beside arguments){close}"
        ) from None
    return given | ({"loader": _Original} if "loader" in parameters else {})


def _files(arguments: dict[str, Any]) -> list[str]:
    """Return the absolute paths of all files that arguments name, and of those in the folders that they name."""
    found: set[str] = set()
    for path in (os.path.abspath(value) for value in arguments.values() if isinstance(value, str)):
        names = walk_files(Path(path), hidden=True) if os.path.isdir(path) else [""]
        found.update(os.path.join(path, name) if name else path for name in names)
    return sorted(filter(os.path.isfile, found))


class _Original:
    """An image file that is not decoded, in place of torchvision's loader."""

    def __init__(self, path: str | Path):
        self.path = Path(path)


class TorchvisionSource:
    """The samples of a data set of torchvision, as it stores them; a `Source`.

    Args:
        config: the data set.

    Attributes:
        data: name of the data set, for messages.
        sample_bytes: bytes of its files for each sample.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, config: TorchvisionConfig):
        import torchvision

        found = _find_class(config)
        arguments = _arguments(config, found)
        self.data = f"torchvision {config.name}" + (f" in {config.root}" if config.root else "")
        with name_errors(f"{self.data}{_UNREADABLE}", "unreadable data set"):
            try:
                self._samples = found(**arguments)
            except RuntimeError as error:
                if "download=True" not in str(error):
                    raise
                raise DataError(
                    f"root: got {config.root}, where files of {config.name} are missing or damaged; set download: true"
                ) from error
            self._count = len(self._samples)
        self.classnames, self.templates = config.classnames or _class_names(self._samples), config.templates
        if self._count:
            self._require_kind(config)
        settings = config.model_dump(mode="json", exclude={"weight", "download", "pickles", "templates"})
        stamps = stamp(_files(arguments))
        files = checksum(f"{torchvision.__version__} {stamps}".encode())
        self.fingerprint: dict[str, Any] = {**settings, "files": files}
        self.sample_bytes = sum(size for _, size, _ in stamps) // max(self._count, 1)

    def __len__(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        """Return data set and row, for messages; see `Source.name`."""
        return f"{self.data}: row {index}"

    def read(self, index: int) -> RawSample:
        """Read one sample; see `Source.read`."""
        with name_sample(self.name(index)):
            return self._read(index)

    def _read(self, index: int) -> RawSample:
        with name_errors("cannot be read by torchvision", "unreadable sample"):
            image, target = self._samples[index]
        captions, label = self._target(target)
        # A file that is unchanged, or PNG, which loses nothing.
        data = read_image(image.path, str(image.path)) if isinstance(image, _Original) else _encode_png(image)
        return RawSample(data, captions, label)

    def _target(self, target: Any) -> tuple[tuple[str, ...], int]:
        """Return captions and label."""
        label = _integer(target)
        if label is None:
            try:
                texts = find_texts(target)
            except ValueError:
                what = f"its target is a {type(target).__name__}; expected a class number or captions"
                raise DataError(what, "no caption") from None
            return require_usable(texts), -1
        if not 0 <= label < len(self.classnames):
            last = len(self.classnames) - 1
            raise DataError(f"class {label}; expected a class number, 0 to {last}", "class number")
        return (), label

    def _require_kind(self, config: TorchvisionConfig) -> None:
        """Look at the first sample: it must be an image with a class number or captions."""
        with name_errors(f"{self.name(0)}{_UNREADABLE}", "unreadable sample"):
            sample = self._samples[0]
        values = sample if isinstance(sample, tuple) else (sample,)
        if len(values) != 2 or not isinstance(values[0], (Image.Image, Tensor, _Original)):
            what = ", ".join(type(each).__name__ for each in values)
            raise DataError(f"{self.data}: its samples are {what}; expected an image, and a class number or captions")
        if _integer(values[1]) is None:
            if config.classnames:
                raise ConfigError(f"classnames: set, and the samples of {config.name} have no class numbers")
            self.classnames = self.templates = ()
        elif not self.classnames:
            raise ConfigError(f"classnames: missing; {config.name} does not have the names of its classes")
        with name_sample(self.name(0)):
            self._target(values[1])


def _integer(value: Any) -> int | None:
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _class_names(data: Any) -> tuple[str, ...]:
    """Return the names of the classes; of several synonyms, as in ImageNet, the first."""
    found = getattr(data, "classes", None) or ()
    names = [each[0] if isinstance(each, tuple) and each else each for each in found]
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


def _encode_png(image: Any) -> bytes:
    if isinstance(image, Tensor):
        if image.ndim != 3 or image.dtype != torch.uint8:
            what = f"image is {image.dtype} of shape {tuple(image.shape)}; expected uint8 (C, H, W)"
            raise DataError(what, "image type")
        image = Image.fromarray(image.permute(1, 2, 0).squeeze(2 if image.shape[0] == 1 else ()).numpy())
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
