from __future__ import annotations

import json
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file

IMPORTS = """
import json, sys, torch, vqclip
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
folder, store = sys.argv[1:]
seen, stored, embeddings = [set(sys.modules)], load_file(store), {}
for modality, ids in stored.items():
    t = vqclip.load_tokenizer(folder, modality, encode=False)
    embeddings[modality] = t.embed(ids).detach()
    t.decode(ids), t.from_vocabulary(t.to_vocabulary(ids)), t.codebook(0)
save_file(embeddings, store)
seen.append(set(sys.modules))
from PIL import Image
for modality, library in (("image", "timm"), ("text", "open_clip")):
    __import__(library)
    seen.append(set(sys.modules))
    t = vqclip.load_tokenizer(folder, modality)
    t.encode(Image.new("RGB", (20, 20)) if modality == "image" else ["a red star"])
    seen.append(set(sys.modules))
print(json.dumps([sorted(after - before) for before, after in zip(seen, seen[1:])]))
"""


TRAINING = {"webdataset", "tensorboard", "tqdm", "fsspec", "aiohttp", "matplotlib", "open_clip_train", "transformers"}


OUR_TRAINING = ("data.loader", "data.workers", "data.sources", "data.index", "losses", "evaluation", "report", "step")


def test_another_process_embeds_the_same_bits_and_imports_what_it_needs(saved, tmp_path, one_thread):
    """Reading: no library of towers or images. Encoding: the tower's own, with what it imports, and nothing else."""
    model, folder = saved
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    inputs = {"image": images, "text": model.text.preprocess(["a red star", "x"])}
    save_file({name: getattr(model, name).encode(batch) for name, batch in inputs.items()}, tmp_path / "stored")
    arguments = [sys.executable, "-c", IMPORTS, str(folder), str(tmp_path / "stored")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    embeddings = load_file(tmp_path / "stored")
    assert embeddings.keys() == inputs.keys()
    for name, batch in inputs.items():
        assert torch.equal(embeddings[name], getattr(model, name)(batch).embedding)

    read, timm, image, open_clip, text = (set(names) for names in json.loads(done.stdout.splitlines()[-1]))
    towers_and_images = {"timm", "open_clip", "torchvision", "PIL", "huggingface_hub"}
    assert sorted(read & (towers_and_images | TRAINING)) == []
    assert "timm" in timm
    assert "open_clip" in open_clip  # so neither reading nor encoding images had imported it
    packages, known = ({name.split(".")[0] for name in names} for names in (image | text, read))
    packages -= known | {"vqclip", "torchvision", "PIL", "simplejpeg"}
    assert sorted(name for name in packages if not name.startswith("_")) == []
    ours = read | image | text
    assert sorted(name for name in ours if name.removeprefix("vqclip.").startswith(OUR_TRAINING)) == []
