"""Evaluate vqclip models with mteb, on its tasks of images, and of images and texts (``pip install 'vqclip[mteb]'``).

    vqclip evaluate mteb runs/base --tasks EuroSATZeroShot Flickr30kI2TRetrieval

or in a program:

    model = load("runs/base", mode="codes_only")
    results = mteb.evaluate(model, mteb.get_tasks(tasks=["EuroSATZeroShot"]))

`MtebModel` has the methods of mteb's ``EncoderProtocol``. Its ``ModelMeta`` is filled from the folder: mteb stores
results under its name, its revision (a digest of the weights) and the mode, so results of other weights are not reused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from vqclip import dist
from vqclip.errors import ConfigError, NonFiniteError, import_extra
from vqclip.evaluation.encode import Mode
from vqclip.integrations.open_clip import Precision, embed, require_mode
from vqclip.io.files import HUB_NAME, read_bounded
from vqclip.tokenizer.folder import CARD_FILE, find_folder
from vqclip.tokenizer.stored import fingerprint
from vqclip.train.ema import Weights
from vqclip.train.export import load_model


class MtebModel:
    """A vqclip model for ``mteb.evaluate``; `load` makes one.

    Attributes:
        mteb_model_meta: mteb's ``ModelMeta``.
    """

    def __init__(self, tokenizers: Mapping[str, Any], mode: Mode, precision: Precision, mteb_model_meta: Any):
        require_mode(tokenizers.values(), mode, precision)
        self.tokenizers, self.mode, self.precision = tokenizers, mode, precision
        self.mteb_model_meta = mteb_model_meta

    def encode(self, inputs: Iterable[Mapping[str, Any]], *, show_progress_bar: bool = True, **about: Any) -> Tensor:
        """Embed the batches of mteb's loader: images, texts, or pairs of both.

        Args:
            inputs: batches with ``image`` (PIL images), ``text`` (captions), or both.
            show_progress_bar: show one on a terminal.
            **about: description of the task; prompts for instructed models are not used.

        Returns:
            ``(n, E)`` float32 unit-norm on the CPU; for pairs the normalised sum of both embeddings.

        Raises:
            ConfigError: an input of a modality that the folder has no tokenizer of.
            NonFiniteError: an embedding is NaN or infinite.
        """
        found = []
        with torch.no_grad():
            for batch in tqdm(inputs, "encode", leave=False, disable=None if show_progress_bar else True):
                each = []
                for name in (name for name in ("image", "text", "audio", "video") if name in batch):
                    if (tokenizer := self.tokenizers.get(name)) is None:
                        raise ConfigError(
                            f"{self.mteb_model_meta.name}: got inputs of modality {name}, and the folder contains a "
                            f"tokenizer of {' and '.join(self.tokenizers)} alone; expected tasks of these"
                        )
                    rows = embed(tokenizer, tokenizer.batch(batch[name]), self.mode, self.precision)
                    each.append(rows.float().cpu())
                found.append(each[0] if len(each) == 1 else F.normalize(each[0] + each[1], dim=-1))
        whole = torch.cat(found)
        if not bool(whole.isfinite().all()):  # comparisons with NaN are false, so NaN would rank as perfect
            raise NonFiniteError(f"{self.mteb_model_meta.name}: embeddings are NaN or infinite; check the weights")
        return whole

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines ``(n, m)`` of unit-norm embeddings ``(n, E)`` and ``(m, E)``."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines ``(n,)`` of unit-norm embeddings ``(n, E)`` and ``(n, E)``."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(dim=-1)


def load(
    folder: str | Path,
    model_name: str | None = None,
    revision: str | None = None,
    *,
    mode: Mode = "codes_only",
    device: str = "auto",
    precision: Precision = "fp32",
    weights: Weights = "averaged",
) -> MtebModel:
    """Load a vqclip model for ``mteb.evaluate``.

    Args:
        folder: of a run, a checkpoint or a tokenizer of images or of both modalities, or a hub name ``owner/name``.
        model_name: name in mteb's results; None: the hub name, or ``vqclip/`` and the name of the folder.
        revision: the revision that is expected, as mteb's ``load_model`` gives it; None: any.
        mode: see `vqclip.integrations.open_clip.load`, also for ``precision`` and ``weights``.
        device: cpu, cuda, ...; auto: a GPU if there is one.
        precision: autocast type.
        weights: averaged or current ones.

    Raises:
        CheckpointError: there is no model, or it is damaged.
        ConfigError: mteb is not installed, the folder has another revision, or it has no codes for ``codes_only``.
    """
    meta_of = import_extra("mteb.models.model_meta", "mteb").ModelMeta
    model, place, _ = load_model(str(folder), weights, images_alone=True)
    model = model.to(dist.choose_device(device, "device"))
    parts = {name: part for name, part in model.named_children() if name in ("image", "text")}
    found = hashlib.sha256("".join(map(fingerprint, parts.values())).encode()).hexdigest()[:40]
    if revision not in (None, found):
        raise ConfigError(f"{place}: got weights of revision {found}, expected {revision}")
    is_hub_name = HUB_NAME.fullmatch(place) and not Path(place).expanduser().exists()
    path, card = Path(folder).expanduser().resolve(), find_folder(place) / CARD_FILE
    title = (path.parent if path.name in ("tokenizer", "model") else path).name
    front = read_bounded(card, 2**16).decode("utf-8", "replace").split("\n---")[0] if card.is_file() else ""
    licence = re.search(r"^license: *['\"]?([\w.-]+)", front, re.MULTILINE)
    known = get_args(import_extra("mteb.types", "mteb").Licenses)
    meta = meta_of(
        loader=partial(load, str(folder), mode=mode, device=device, precision=precision, weights=weights),
        name=model_name or (place if is_hub_name else f"vqclip/{title}"),
        revision=found,
        release_date=None,
        languages=None,
        n_parameters=sum(weight.numel() for weight in model.parameters()),
        memory_usage_mb=sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20,
        max_tokens=parts["text"].preprocess.context_length if "text" in parts else None,
        embed_dim=model.image.embed_dim,
        license=licence[1] if licence is not None and licence[1] in known else None,
        open_weights=True,
        public_training_code=None,
        public_training_data=None,
        framework=["PyTorch", "safetensors"],
        reference=f"https://huggingface.co/{place}" if is_hub_name else None,
        similarity_fn_name="cosine",
        use_instructions=False,
        training_datasets=None,  # unknown, which is not the same as none
        modalities=[*parts],
        experiment_kwargs={"mode": mode, "precision": precision, "weights": weights},
    )
    try:
        return MtebModel(parts, mode, precision, meta)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
