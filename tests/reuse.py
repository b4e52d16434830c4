"""What somebody does who has nothing but the installed package and tokenizer folders; run as a script.

    python reuse.py encode FOLDERS STORE     # ids of STORE/inputs.safetensors, from whole tokenizers
    python reuse.py read FOLDERS STORE       # vectors and embeddings of those ids, in a process without towers

Every folder in FOLDERS is a tokenizer folder of both modalities. Prints where vqclip comes from. Imports nothing of the
tests, for it also runs where they are not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import vqclip

torch.set_num_threads(1)


def encode(folders: list[Path], store: Path) -> None:
    images = load_file(store / "inputs.safetensors")["images"]
    inputs = {"image": images, "text": json.loads((store / "captions.json").read_text())}
    ids = {}
    for folder in folders:
        for modality, batch in inputs.items():
            ids[f"{folder.name}/{modality}"] = vqclip.load_tokenizer(folder, modality).encode(batch)
    save_file(ids, store / "ids.safetensors")


def read(folders: list[Path], store: Path) -> None:
    stored, out = load_file(store / "ids.safetensors"), {}
    for folder in folders:
        for modality in ("image", "text"):
            key = f"{folder.name}/{modality}"
            tokenizer = vqclip.load_tokenizer(folder, modality, encode=False)
            with torch.no_grad():
                out[f"{key}/vectors"] = tokenizer.decode(stored[key])
                out[f"{key}/embedding"] = tokenizer.embed(stored[key])
    assert not {"timm", "open_clip", "torchvision", "webdataset", "PIL"} & set(sys.modules)
    save_file(out, store / "read.safetensors")


if __name__ == "__main__":
    what, where, beside = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    {"encode": encode, "read": read}[what](sorted(where.iterdir()), beside)
    print(vqclip.__file__)
