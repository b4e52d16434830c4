"""Tokenizer folders: one reader of the schema in `vqclip.tokenizer.schema`, strict and without pickle.

    config.json ── checksum, format, schema ─┬─> sections of the tokenizers
         └ size and SHA-256 of the weights   │
           and of tokenizer.json, if any     │
    model.safetensors ── bytes, then names and shapes in the header ──> modules, built and filled
    pixels.safetensors ── likewise, if the configuration has a section on pixels ──> pixel decoder

A folder contains an image tokenizer, a text tokenizer, or both with their temperature. Weights of a part are stored
under its name (``image.``, ``text.``), so that one modality is read without the other. Nothing here imports a tower's
library or fetches weights, and no file is opened that the configuration names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from vqclip.config import Modality
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io.atomic import FileDigest, verify_file
from vqclip.io.files import PICKLED, read_bounded
from vqclip.io.json_files import read_checked, validate
from vqclip.io.tensors import (
    first_names,
    nonfinite_names,
    open_tensors,
    read_shapes,
    shape_differences,
    tensor_differences,
)
from vqclip.pixels.decoder import PIXELS_FILE, PixelsConfig, attach
from vqclip.tokenizer.decoder import DecoderConfig, TokenizerDecoder
from vqclip.tokenizer.schema import EXTRA_FILES, FolderConfig, StoredTokenizer
from vqclip.tokenizer.stored import JoinedTensors, frozen_file, open_joined, verify_frozen

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PIXELS_PREFIX = "image.pixels."
"""Beginning of the names of the tensors in `PIXELS_FILE`, which no other file has."""
CARD_FILE = "README.md"
PROCESSOR_FILE = "preprocessor_config.json"
"""Names the class by which AutoImageProcessor of transformers reads the folder; never read here."""
FILES = (CONFIG_FILE, WEIGHTS_FILE, PIXELS_FILE, CARD_FILE, PROCESSOR_FILE, *EXTRA_FILES)
"""The only files that are fetched from the hub or sent to it."""
ID_LAYOUT_VERSION = 1
"""Meaning of ids ``(B, N, C)``; raised when an id of an old folder would no longer mean the same code."""
VERSIONS = {"format": "vqclip", "format_version": 3, "id_layout": ID_LAYOUT_VERSION}
"""Keys of ``config.json`` that must have these values."""

_TEMPERATURE = ("logit_scale", "logit_bias")
_ENCODER_PARTS = ("tower", "reduce", "project_in")
"""Modules of a tokenizer that decoding does not need."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)
DecoderConfigT = TypeVar("DecoderConfigT", bound=DecoderConfig)


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer folder that was read and verified; `open` makes one."""

    path: Path
    """The folder."""
    config: FolderConfig
    """Content of its ``config.json``."""

    @staticmethod
    def open(path: Path) -> TokenizerFolder:
        """Read ``config.json``, and compare every byte of it and of the weights with their checksums.

        The names and shapes in the weights' header are compared with the configuration as well, before memory is taken
        for the sizes that it asks for.

        Raises:
            CheckpointError: a file is missing, damaged, of another version, or does not fit the schema.
        """
        config = _read_config(path)
        _verify_weights(path / WEIGHTS_FILE, config.weights)
        if config.pixels is not None:
            _verify_weights(path / PIXELS_FILE, config.pixels.weights)
        for name, digest in config.files.items():
            verify_file(path / name, digest, CONFIG_FILE)
        folder = TokenizerFolder(path, config)
        if config.frozen is not None:
            verify_frozen(frozen_file(path, WEIGHTS_FILE), config.frozen, path / CONFIG_FILE)
        folder._verify_header()
        return folder

    def section(self, modality: Modality) -> StoredTokenizer:
        """Return the section of one tokenizer; raise CheckpointError if the folder lacks it."""
        found: StoredTokenizer | None = getattr(self.config, modality)
        if found is None:
            held = ", ".join(self.config.modalities) or "no"
            raise CheckpointError(f"{self.path}: contains {held} tokenizer; expected one of modality {modality!r}")
        return found

    def tokenizer_config(self, modality: Modality, schema: type[DecoderConfigT]) -> DecoderConfigT:
        """Return the whole configuration of a tokenizer, with random weights in place of pretrained ones.

        Raises:
            CheckpointError: the folder lacks this tokenizer, or its section does not fit the schema.
        """
        own = {"embed_dim", "num_tokens", "fewest_tokens"}
        section = self.section(modality).model_dump(exclude=own, exclude_unset=True)
        config = validate(self.path / CONFIG_FILE, schema, section, modality).architecture()
        prefix = f"{modality}.tower."
        with self._open_weights({}) as file:
            shapes = read_shapes(file, [name for name in file.keys() if name.startswith(prefix)])  # noqa: SIM118
        files: dict[str, bytes] = {
            name: read_bounded(self.path / name, digest.size) for name, digest in self.config.files.items()
        }
        try:
            return config.with_stored(files, {name.removeprefix(prefix): shape for name, shape in shapes.items()})
        except ConfigError as error:
            raise CheckpointError(f"{self.path / CONFIG_FILE}: {modality}.{error}") from error

    def require_counts(self, built: TokenizerDecoder) -> None:
        """Compare the stored numbers of tokens with those of a tokenizer's tower; raise ConfigError if they differ."""
        for key in ("num_tokens", "fewest_tokens"):
            stored, actual = getattr(getattr(self.config, built.modality), key), getattr(built, key)
            if stored != actual:
                raise ConfigError(f"{built.modality}.{key}: got {stored}; this tower has {actual}")

    def load_decoder(self, modality: Modality) -> TokenizerDecoder:
        """Return a tokenizer without its tower, in evaluation mode."""
        stored = self.section(modality)
        sizes = stored.num_tokens, stored.fewest_tokens, stored.embed_dim
        tokenizer = self.load(lambda: stored.build_decoder(modality, *sizes), f"{modality}.", without=_ENCODER_PARTS)
        self.load_pixels(tokenizer)
        return tokenizer

    def load_pixels(self, tokenizer: TokenizerDecoder) -> None:
        """Attach the pixel decoder of the folder, if there is one, to the image tokenizer of the folder.

        Raises:
            CheckpointError: the configuration cannot be built, or the weights do not fit it.
        """
        stored = self.config.pixels
        if stored is None or tokenizer.modality != "image":
            return
        sizes = tokenizer.quantizer.dim, tokenizer.num_tokens
        config = PixelsConfig(**{name: getattr(stored, name) for name in PixelsConfig.model_fields})
        path = self.path / PIXELS_FILE
        with self._name_config_errors("pixels."), torch.device("meta"):
            expected = {
                f"{PIXELS_PREFIX}{name}": tuple(t.shape) for name, t in config.build(*sizes).state_dict().items()
            }
        with open_joined([path], {}) as file:
            _require_no_problems(path, shape_differences(expected, read_shapes(file)))  # before memory is taken
            decoder = config.build(*sizes)
            _load(path, file, decoder, PIXELS_PREFIX, adopt_dtype=True)
        with self._name_config_errors("pixels."):
            attach(tokenizer, decoder.eval())

    @torch.inference_mode(False)  # so that the module can be used outside of inference mode
    def load(self, build: Callable[[], ModuleT], prefix: str = "", without: tuple[str, ...] = ()) -> ModuleT:
        """Build a module, load the weights under ``prefix`` into it, in their type, and put it into evaluation mode.

        Args:
            build: makes the module with random weights.
            prefix: prefix of its tensors' names in the folder.
            without: parts under ``prefix`` that the module lacks, such as ``tower``; they are not read.

        Raises:
            CheckpointError: the configuration cannot be built, or the weights do not fit it.
        """
        with self._name_config_errors(prefix):
            module = build()
        with self._open_weights({}) as file:
            _load(self.path / WEIGHTS_FILE, file, module, prefix, adopt_dtype=True, without=without)
        for part in module.modules():
            if isinstance(part, TokenizerDecoder):
                part.stored_dtype = part.pool.position.dtype
        return module.eval()

    @contextmanager
    def _name_config_errors(self, prefix: str) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            message = str(error) if str(error).startswith(prefix) else f"{prefix.removesuffix('.')}: {error}"
            raise CheckpointError(f"{self.path / CONFIG_FILE}: {message}") from error

    def merge_adapters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge adapters among ``tensors``, such as their moving averages, into the stored matrices that they change.

        Returns:
            All tensors, by the names that they have in a model without adapters.
        """
        with self._open_weights(tensors) as file:
            return file.merge_replaced()

    def _open_weights(self, replaced: Mapping[str, Tensor]) -> AbstractContextManager[JoinedTensors]:
        """Open the weights, with those that a checkpoint stores elsewhere."""
        frozen = [frozen_file(self.path, WEIGHTS_FILE)] if self.config.frozen is not None else []
        scales = {f"{modality}.tower.": scale for modality, scale in self.config.adapters.items()}
        return open_joined([self.path / WEIGHTS_FILE, *frozen], scales, replaced)

    def _verify_header(self) -> None:
        """Compare the names of all tensors and the shapes of some with the configuration."""
        expected: dict[str, tuple[int, ...]] = {}
        for modality in self.config.modalities:
            with self._name_config_errors(f"{modality}.quantizer."):
                expected |= self.section(modality).expected_shapes(f"{modality}.")
        prefixes = tuple(f"{modality}." for modality in self.config.modalities)
        others = () if self.config.temperature is None else _TEMPERATURE
        with open_tensors(self.path / WEIGHTS_FILE) as file:
            names, shapes = list(file.keys()), read_shapes(file, expected)
        strays = [
            f"unexpected {name}"
            for name in names
            if (not name.startswith(prefixes) and name not in others) or name.startswith(PIXELS_PREFIX)
        ]
        _require_no_problems(self.path / WEIGHTS_FILE, strays + shape_differences(expected, shapes))


def load_weights(folder: Path, module: nn.Module, constants: Collection[str] = ()) -> None:
    """Load the tensors of ``folder`` into ``module``, bit for bit: every one, and no other.

    Args:
        folder: the tokenizer folder.
        module: the module to fill.
        constants: names of its tensors that are not in the folder and stay as they are.

    Raises:
        CheckpointError: for a missing or damaged file, for missing, unexpected or wrongly shaped or typed tensors, and
            for NaN or infinity in them.
    """
    with _open_all(folder) as file:
        _load(folder / WEIGHTS_FILE, file, module, constants=constants)


def read_weights(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``folder``, mapped from the file: one that is not used takes no memory.

    Args:
        folder: the tokenizer folder.
        expected: every tensor by name, for its shape and type.

    Raises:
        CheckpointError: as for `load_weights`.
    """
    path = folder / WEIGHTS_FILE
    with _open_all(folder) as file:
        state = _read(path, file, file.keys(), {name: tuple(each.shape) for name, each in expected.items()})
    _require_no_problems(path, tensor_differences(expected, state))
    return state


def _open_all(folder: Path) -> AbstractContextManager[JoinedTensors]:
    paths = [folder / name for name in (WEIGHTS_FILE, PIXELS_FILE) if name == WEIGHTS_FILE or (folder / name).exists()]
    return open_joined(paths, {})


def _read(
    path: Path, file: JoinedTensors, names: Collection[str], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return tensors of an open file by name, after comparing names and shapes, which takes no memory."""
    _require_no_problems(path, shape_differences(expected, read_shapes(file, names)))
    state = {name: file.get_tensor(name) for name in names}
    if bad := nonfinite_names(state):
        held = file.path_of(bad[0])
        remedy = "use an older checkpoint" if held == path else "restore a copy of it, which all checkpoints need"
        raise CheckpointError(f"{held}: these tensors contain NaN or infinity: {first_names(bad)}; {remedy}")
    return state


def _load(
    path: Path,
    file: JoinedTensors,
    module: nn.Module,
    prefix: str = "",
    *,
    adopt_dtype: bool = False,
    without: tuple[str, ...] = (),
    constants: Collection[str] = (),
) -> None:
    """Load the tensors under ``prefix`` in an open file into ``module``; see `load_weights` and `TokenizerFolder`.

    Args:
        path: of the file, for errors.
        file: the open file, or several as one.
        module: the module to fill.
        prefix: prefix of its tensors' names in the file.
        adopt_dtype: first convert the module to the floating-point type that it was saved in.
        without: parts under ``prefix`` that ``module`` lacks, such as ``tower``; they are not read.
        constants: names of its tensors that are not in the file.
    """
    left_out = tuple(f"{prefix}{part}." for part in without)
    stored = {name: tensor for name, tensor in module.state_dict().items() if name not in constants}
    expected = {f"{prefix}{name}": tuple(tensor.shape) for name, tensor in stored.items()}
    names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a mapping)
    names = [name for name in names if not name.startswith(left_out)]
    found = _read(path, file, names, expected)
    state = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    if adopt_dtype:
        dtypes = [state[name].dtype for name, _ in module.named_parameters() if name in state]
        floats = [dtype for dtype in dtypes if dtype.is_floating_point]
        if floats:  # the most common one: codebooks stay in float32 when the rest is rounded
            module.to(Counter(floats).most_common(1)[0][0])
    filled = module.state_dict()
    _require_no_problems(path, tensor_differences({name: filled[name] for name in stored}, state, prefix))
    module.load_state_dict(state, strict=not constants)


def read_frozen_digest(folder: Path) -> FileDigest | None:
    """Return the digest of the frozen tensors that a checkpoint's model folder needs; None if it needs none."""
    return _read_config(folder).frozen


def _read_config(folder: Path) -> FolderConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        if (folder / "tokenizer" / CONFIG_FILE).is_file():
            found = f"a run's folder; name its tokenizer: {folder / 'tokenizer'}"
        raise CheckpointError(
            f"{folder}: expected a tokenizer folder with {CONFIG_FILE} and {WEIGHTS_FILE}, got: {found}"
            + _mention_pickles(folder)
        )
    remedy = "expected a folder that save_pretrained of this version wrote" + _mention_pickles(folder)
    return read_checked(path, FolderConfig, VERSIONS, remedy)


def _verify_weights(path: Path, expected: FileDigest) -> None:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file{_mention_pickles(path.parent) or '; pickled weights are never fetched'}"
        )
    verify_file(path, expected, CONFIG_FILE)


def _mention_pickles(folder: Path) -> str:
    """Return the end of a message on files that could contain a pickle; empty if there are none."""
    if not folder.is_dir():
        return ""
    found = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLED)
    return f"; pickled files are never opened, for a pickle can run code: {', '.join(found[:8])}" if found else ""


def _require_no_problems(path: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{path} does not fit its {CONFIG_FILE}: " + "; ".join(problems[:10]))
