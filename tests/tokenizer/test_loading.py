from __future__ import annotations

import json
import subprocess
import sys

import pytest

IMPORTS = """
import json, sys, torch, vqclip
folder, modality, library = sys.argv[1:]
seen = [set(sys.modules)]
t = vqclip.load_tokenizer(folder, modality, encode=False)
ids = torch.zeros(1, t.num_tokens, 1, dtype=torch.int64).expand(-1, -1, len(t.codebook_sizes))
t.decode(ids), t.embed(ids), t.from_vocabulary(t.to_vocabulary(ids)), t.codebook(0)
seen.append(set(sys.modules))
__import__(library)
seen.append(set(sys.modules))
from PIL import Image
t = vqclip.load_tokenizer(folder, modality)
t.encode(Image.new("RGB", (20, 20)) if modality == "image" else ["a red star"])
seen.append(set(sys.modules))
print(json.dumps([sorted(after - before) for before, after in zip(seen, seen[1:])]))
"""


TRAINING = {"webdataset", "tensorboard", "tqdm", "fsspec", "aiohttp", "matplotlib", "open_clip_train", "transformers"}


OUR_TRAINING = ("data.loader", "data.workers", "data.sources", "data.index", "losses", "evaluation", "report", "step")


@pytest.mark.parametrize(("modality", "library"), [("image", "timm"), ("text", "open_clip")])
def test_what_reading_and_encoding_import(saved, modality, library):
    """Reading: no library of towers or pictures. Encoding: the tower's own, with what it imports, and nothing else."""
    arguments = [sys.executable, "-c", IMPORTS, str(saved[1]), modality, library]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    read, theirs, encoding = (set(names) for names in json.loads(done.stdout.splitlines()[-1]))
    assert library in theirs  # so that reading had not imported it
    towers_and_pictures = {"timm", "open_clip", "torchvision", "PIL", "huggingface_hub"}
    assert sorted(read & (towers_and_pictures | TRAINING)) == []
    if modality == "image":
        assert "open_clip" not in theirs | encoding
    packages = {name.split(".")[0] for name in encoding} - {"vqclip", "torchvision", "PIL"}
    assert sorted(name for name in packages if not name.startswith("_")) == []
    assert sorted(name for name in read | encoding if name.removeprefix("vqclip.").startswith(OUR_TRAINING)) == []
