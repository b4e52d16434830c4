"""Tokenizer folders: their schema, and its one reader, strict and without pickle.

    config.json ── checksum, format, schema ──> sections of the tokenizers
         └ size and SHA-256 of the weights and of tokenizer.json, if any
    model.safetensors ── bytes, then names and shapes in the header ──> tensors
    pixels.safetensors ── likewise, if the configuration has a section on pixels

`TokenizerFolder.open` opens each file of weights once, and tensors are read from what it compared with the checksum,
even if another file has the path by then. `vqclip.tokenizer.loading` makes modules of them.

A folder contains an image tokenizer, a text tokenizer, or both with their temperature. Weights of a part are stored
under its name (``image.``, ``text.``), so that one modality is read without the other. Nothing here imports a tower's
library or fetches weights, and no file is opened that the configuration names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vqclip.config import Config, Modality
from vqclip.config.bounds import EmbedDim, NumTokens
from vqclip.errors import CheckpointError, ConfigError
from vqclip.io import files
from vqclip.io.atomic import FileDigest, verify_file
from vqclip.io.files import PICKLED
from vqclip.io.json_files import read_checked
from vqclip.io.tensors import (
    first_names,
    nonfinite_names,
    open_verified,
    read_shapes,
    shape_differences,
    tensor_differences,
)
from vqclip.nn.temperature import TemperatureConfig
from vqclip.pixels.decoder import PIXELS_FILE, PixelsConfig, attach
from vqclip.tokenizer.decoder import DecoderConfig, TokenizerDecoder
from vqclip.tokenizer.stored import StoredTensors, frozen_file, open_frozen

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PIXELS_PREFIX = "image.pixels."
"""Beginning of the names of the tensors in `PIXELS_FILE`, which no other file has."""
CARD_FILE = "README.md"
PROCESSOR_FILE = "preprocessor_config.json"
"""Names the class by which AutoImageProcessor of transformers reads the folder; never read here."""
EXTRA_FILES = ("tokenizer.json",)
"""Files that some towers need: the vocabulary of a text tower of transformers."""
FILES = (CONFIG_FILE, WEIGHTS_FILE, PIXELS_FILE, CARD_FILE, PROCESSOR_FILE, *EXTRA_FILES)
"""The only files that are fetched from the hub or sent to it."""
ID_LAYOUT_VERSION = 1
"""Meaning of ids ``(B, N, C)``; raised when an id of an old folder would no longer mean the same code."""
VERSIONS = {"format": "vqclip", "format_version": 3, "id_layout": ID_LAYOUT_VERSION}
"""Keys of ``config.json`` that must have these values."""
MODALITIES: tuple[Modality, ...] = ("image", "text")
MODEL_TYPES = {("image",): "vqclip_image_tokenizer", ("text",): "vqclip_text_tokenizer", ("image", "text"): "vqclip"}
"""Modalities of a folder → name by which transformers finds the class; see `vqclip.integrations.transformers`."""

_TEMPERATURE = ("logit_scale", "logit_bias")
_MAX_FILE_BYTES = 64 << 20
"""Larger further files are not read; the largest `tokenizer.json` in use have 35 MB."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class StoredTokenizer(DecoderConfig):
    """A tokenizer's section of ``config.json``.

    The keys that only encoding needs are checked by `vqclip.tokenizer.loading`, for their schemas import the
    towers.
    """

    embed_dim: EmbedDim
    """E, width of the joint embedding."""
    num_tokens: NumTokens
    """N, tokens a sample."""
    fewest_tokens: NumTokens
    """Smallest number of tokens in a batch."""
    tower: dict[str, Any]
    """From pixels or captions to features."""
    reduce: dict[str, Any] | None = None
    """From the tower's features to fewer ones; absent if all are kept."""
    project_in: dict[str, Any]
    """From features to the quantizer's channels."""
    normalize: str
    """Normalisation of those channels."""
    preprocess: dict[str, Any] | None = None
    """Preparation of images; absent for text."""

    @model_validator(mode="after")
    def _fewest_within_tokens(self) -> StoredTokenizer:
        if self.fewest_tokens > self.num_tokens:
            raise ValueError(
                f"got num_tokens {self.num_tokens} and fewest_tokens {self.fewest_tokens}; expected fewest_tokens <= "
                "num_tokens"
            )
        return self

    def build(self, modality: Modality) -> TokenizerDecoder:
        """Make the part that decodes, with random weights."""
        quantizer = self.quantizer.build()
        output = self.build_output(quantizer, self.num_tokens, self.embed_dim)
        decoder = TokenizerDecoder(modality, quantizer, *output, self.fewest_tokens)
        decoder.config = self
        return decoder


class StoredPixels(PixelsConfig):
    """The pixel decoder's section of ``config.json``."""

    weights: FileDigest
    """Digest of ``pixels.safetensors``."""


class FolderConfig(Config):
    """Schema of ``config.json`` without its versions and checksum: one tokenizer, or both and their temperature."""

    model_type: Literal["vqclip", "vqclip_image_tokenizer", "vqclip_text_tokenizer"] | None = None
    """Name for transformers, see `MODEL_TYPES`; absent in older folders."""
    weights: FileDigest
    """Digest of ``model.safetensors``."""
    files: dict[Literal["tokenizer.json"], FileDigest] = {}
    """Digests of the files that a tower needs, by name; absent if none."""
    image: StoredTokenizer | None = None
    """The image tokenizer."""
    text: StoredTokenizer | None = None
    """The text tokenizer."""
    temperature: TemperatureConfig | None = None
    """Scale and bias of the logits, if both tokenizers are present."""
    pixels: StoredPixels | None = None
    """The pixel decoder of the image tokenizer; absent if it has none."""
    frozen: FileDigest | None = None
    """Digest of the run's file of frozen tensors, which are not in ``model.safetensors``; only in checkpoints."""
    adapters: dict[Modality, Annotated[float, Field(gt=0)]] = {}
    """Factors on the adapters of towers, which are merged when the tokenizer is loaded; only in checkpoints."""

    @model_validator(mode="after")
    def _complete(self) -> FolderConfig:
        if self.text is not None and self.text.preprocess is not None:
            raise ValueError("text.preprocess: got a section; expected none, which only images have")
        if self.pixels is not None and self.image is None:
            raise ValueError("pixels: got a section without an image tokenizer; expected both or neither")
        needed = set() if self.text is None or self.text.tower.get("kind") != "transformers" else set(EXTRA_FILES)
        if set(self.files) != needed:
            raise ValueError(f"files: got {sorted(self.files)}; expected {sorted(needed)} for these towers")
        for name, digest in self.files.items():
            if digest.size > _MAX_FILE_BYTES:
                raise ValueError(f"files.{name}: got {digest.size} bytes; expected at most {_MAX_FILE_BYTES}")
        if self.image is not None and self.text is not None:
            if self.temperature is None:
                raise ValueError("both tokenizers are here; expected a temperature too")
            if self.image.embed_dim != self.text.embed_dim:
                raise ValueError(
                    f"got embed_dim {self.image.embed_dim} for image and {self.text.embed_dim} for text; "
                    "expected one joint embedding"
                )
        elif self.temperature is not None:
            raise ValueError("got a temperature with fewer than two tokenizers; expected none")
        return self

    @property
    def modalities(self) -> list[Modality]:
        """Modalities that the folder contains."""
        return [name for name in MODALITIES if getattr(self, name) is not None]


PACKAGED = ("emoji",)
"""Names of the tokenizers that come with the package; a folder of the same name has precedence."""


def find_folder(folder: str | Path, revision: str | None = None) -> Path:
    """Return a tokenizer folder: a local one, that of a run, one of this package, or one fetched from the hub.

    Of the hub only JSON, safetensors and the card are fetched.

    Raises:
        CheckpointError: see `vqclip.io.files.find_folder`; or a run has not exported its tokenizer yet.
    """
    if str(folder) in PACKAGED and revision is None and not Path(folder).exists():
        return Path(__file__).parents[1] / "packaged" / folder
    found = files.find_folder(folder, revision, FILES)
    if (found / CONFIG_FILE).is_file():
        return found
    if (found / "tokenizer" / CONFIG_FILE).is_file():
        return found / "tokenizer"
    if (found / "config.yaml").is_file():
        raise CheckpointError(
            f"{found}: a run that has exported no tokenizer yet; expected a finished one, or the folder that `vqclip "
            f"export-tokenizer {found}` makes of its newest checkpoint"
        )
    return found


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer folder that was read and verified, with its weights open; `open` makes one."""

    path: Path
    """The folder."""
    config: FolderConfig
    """Content of its ``config.json``."""
    weights: StoredTensors
    """All tensors but those of the pixel decoder, with those that a checkpoint stores elsewhere."""
    pixels: StoredTensors | None
    """Tensors of the pixel decoder, if there is one."""

    @staticmethod
    def open(path: Path) -> TokenizerFolder:
        """Read ``config.json``, open the weights, and compare every byte of both with their checksums.

        The names and shapes in the weights' header are compared with the configuration as well, before memory is taken
        for the sizes that it asks for.

        Raises:
            CheckpointError: a file is missing, damaged, of another version, or does not fit the schema.
        """
        config = _read_config(path)
        opened = {path / WEIGHTS_FILE: _open_weights(path / WEIGHTS_FILE, config.weights)}
        pixels = None
        if config.pixels is not None:
            pixels = StoredTensors({path / PIXELS_FILE: _open_weights(path / PIXELS_FILE, config.pixels.weights)}, {})
        for name, digest in config.files.items():
            verify_file(path / name, digest, CONFIG_FILE)
        if config.frozen is not None:
            frozen = frozen_file(path, WEIGHTS_FILE)
            opened[frozen] = open_frozen(frozen, config.frozen, path / CONFIG_FILE)
        scales = {f"{modality}.tower.": scale for modality, scale in config.adapters.items()}
        folder = TokenizerFolder(path, config, StoredTensors(opened, scales), pixels)
        folder._require_sizes()
        return folder

    def _require_sizes(self) -> None:
        """Compare the names of all tensors, and the shapes of those that decode, with the configuration."""
        config, expected = self.config, dict[str, tuple[int, ...]]()
        for modality in config.modalities:
            with self.name_config_errors(f"{modality}."), torch.device("meta"):
                decoder = self.section(modality).build(modality)
            expected |= {f"{modality}.{name}": tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
            if config.pixels is not None and self.pixels is not None and modality == "image":
                with self.name_config_errors("pixels."), torch.device("meta"):
                    outline = config.pixels.build(decoder.quantizer.dim, decoder.num_tokens).state_dict()
                shapes = {f"{PIXELS_PREFIX}{name}": tuple(tensor.shape) for name, tensor in outline.items()}
                _require_none(self.path / PIXELS_FILE, shape_differences(shapes, read_shapes(self.pixels)))
        prefixes = tuple(f"{modality}." for modality in config.modalities)
        others = () if config.temperature is None else _TEMPERATURE
        strays = [
            f"unexpected {name}"
            for name in self.weights.keys()  # noqa: SIM118 (not a mapping)
            if (not name.startswith(prefixes) and name not in others) or name.startswith(PIXELS_PREFIX)
        ]
        problems = strays + shape_differences(expected, read_shapes(self.weights, expected))
        _require_none(self.path / WEIGHTS_FILE, problems)

    def section(self, modality: Modality) -> StoredTokenizer:
        """Return the section of one tokenizer; raise CheckpointError if the folder lacks it."""
        found: StoredTokenizer | None = getattr(self.config, modality)
        if found is None:
            held = ", ".join(self.config.modalities) or "no"
            raise CheckpointError(f"{self.path}: contains {held} tokenizer; expected one of modality {modality!r}")
        return found

    @torch.inference_mode(False)  # so that the module can be used outside of inference mode
    def load(self, build: Callable[[], ModuleT], prefix: str = "", without: tuple[str, ...] = ()) -> ModuleT:
        """Build tokenizers, and load their weights and the pixel decoder, if there is one.

        Args:
            build: makes a tokenizer, or a module that contains tokenizers, with random weights.
            prefix: prefix of its tensors' names in the folder.
            without: parts under ``prefix`` that the module lacks, such as ``tower``; they are not read.

        Returns:
            The module on the CPU, in evaluation mode, with weights in their type that require no gradient.

        Raises:
            CheckpointError: the configuration cannot be built, or the weights do not fit it.
        """
        module = self._fill(WEIGHTS_FILE, self.weights, build, prefix, without)
        for part in [part for part in module.modules() if isinstance(part, TokenizerDecoder)]:
            part.stored_dtype = part.pool.position.dtype
            if self.pixels is not None and part.modality == "image":
                stored, sizes = self.config.pixels, (part.quantizer.dim, part.num_tokens)
                config = PixelsConfig(**{name: getattr(stored, name) for name in PixelsConfig.model_fields})
                decoder = self._fill(PIXELS_FILE, self.pixels, partial(config.build, *sizes), PIXELS_PREFIX)
                with self.name_config_errors("pixels."):
                    attach(part, decoder)
        return module.requires_grad_(False)

    def _fill(
        self, name: str, file: StoredTensors, build: Callable[[], ModuleT], prefix: str, without: tuple[str, ...] = ()
    ) -> ModuleT:
        """Build a module on the CPU, and load its weights from an open file.

        Raises:
            ConfigError: torch's default device is `meta`: what follows would replace some of what was loaded.
        """
        path = self.path / name
        if torch.get_default_device().type == "meta":
            raise ConfigError(
                f"{self.path}: got torch's default device meta, as within from_pretrained of a transformers model, "
                "which would replace some of the loaded tensors; load it outside, and set it as an attribute"
            )
        with self.name_config_errors(prefix), torch.device("cpu"):
            module = build()
            for part in module.modules():
                if isinstance(part, TokenizerDecoder):
                    _require_counts(part, self.section(part.modality))
        left_out = tuple(f"{prefix}{part}." for part in without)
        names = [name for name in file.keys() if name.startswith(prefix) and not name.startswith(left_out)]  # noqa: SIM118
        found = _read(path, file, names, module.state_dict(), prefix)
        state = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
        dtypes = [state[name].dtype for name, _ in module.named_parameters()]
        if floats := [dtype for dtype in dtypes if dtype.is_floating_point]:
            module.to(Counter(floats).most_common(1)[0][0])  # codebooks stay in float32 when the rest is rounded
        _require_none(path, tensor_differences(module.state_dict(), state, prefix))
        module.load_state_dict(state, strict=True)
        return module.eval()

    @contextmanager
    def name_config_errors(self, prefix: str) -> Iterator[None]:
        """Raise errors of the configuration below ``prefix`` as those of the folder."""
        try:
            yield
        except ConfigError as error:
            message = str(error) if str(error).startswith(prefix) else f"{prefix.removesuffix('.')}: {error}"
            raise CheckpointError(f"{self.path / CONFIG_FILE}: {message}") from error


def _require_counts(built: TokenizerDecoder, section: StoredTokenizer) -> None:
    """Compare the stored numbers of tokens with those of a tokenizer; raise ConfigError if they differ."""
    for key in ("num_tokens", "fewest_tokens"):
        if getattr(section, key) != getattr(built, key):
            raise ConfigError(
                f"{built.modality}.{key}: got {getattr(section, key)}; this tower has {getattr(built, key)}"
            )


def read_weights(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``folder``, mapped from the file: one that is not used takes no memory.

    Args:
        folder: the tokenizer folder.
        expected: every tensor by name, for its shape and type.

    Raises:
        CheckpointError: for a missing or damaged file, for missing, unexpected or wrongly shaped or typed tensors, and
            for NaN or infinity in them.
    """
    paths = [folder / name for name in (WEIGHTS_FILE, PIXELS_FILE) if name == WEIGHTS_FILE or (folder / name).exists()]
    file = StoredTensors({path: open_verified(path) for path in paths}, {})
    state = _read(paths[0], file, file.keys(), expected)
    _require_none(paths[0], tensor_differences(expected, state))
    return state


def _read(
    path: Path, file: StoredTensors, names: Collection[str], expected: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Tensor]:
    """Return tensors of an open file by name, after comparing names and shapes, which takes no memory."""
    shapes = {f"{prefix}{name}": tuple(tensor.shape) for name, tensor in expected.items()}
    _require_none(path, shape_differences(shapes, read_shapes(file, names)))
    state = {name: file.get_tensor(name) for name in names}
    if bad := nonfinite_names(state):
        held = file.path_of(bad[0])
        remedy = "use an older checkpoint" if held == path else "restore a copy of it, which all checkpoints need"
        raise CheckpointError(f"{held}: these tensors contain NaN or infinity: {first_names(bad)}; {remedy}")
    return state


def read_frozen_digest(folder: Path) -> FileDigest | None:
    """Return the digest of the frozen tensors that a checkpoint's model folder needs; None if it needs none."""
    return _read_config(folder).frozen


def _read_config(folder: Path) -> FolderConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise CheckpointError(
            f"{folder}: expected a tokenizer folder with {CONFIG_FILE} and {WEIGHTS_FILE}, got: {found}"
            + _mention_pickles(folder)
        )
    remedy = "expected a folder that save_pretrained of this version wrote" + _mention_pickles(folder)
    return read_checked(path, FolderConfig, VERSIONS, remedy)


def _open_weights(path: Path, expected: FileDigest) -> Any:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file{_mention_pickles(path.parent) or '; pickled weights are never fetched'}"
        )
    return open_verified(path, expected, CONFIG_FILE)


def _mention_pickles(folder: Path) -> str:
    """Return the end of a message on files that could contain a pickle; empty if there are none."""
    if not folder.is_dir():
        return ""
    found = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLED)
    return f"; pickled files are never opened, for a pickle can run code: {', '.join(found[:8])}" if found else ""


def _require_none(path: Path, problems: list[str]) -> None:
    """Raise CheckpointError with the first of the lines in which a file differs from its configuration, if any."""
    if problems:
        raise CheckpointError(f"{path} does not fit its {CONFIG_FILE}: " + "; ".join(problems[:10]))
