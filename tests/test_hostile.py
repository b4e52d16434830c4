"""Files made to do harm, read by a process whose memory is watched: each is refused by name, and nothing runs."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vqclip
from tests.checkpoint.making import save_checkpoint
from tests.data import hostile
from tests.data.making import caption_members, class_folder, encode, pixels, tar_bytes, write_tar
from tests.models import reseal, tiny_model
from vqclip import checkpoint
from vqclip.config import load_config
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, FolderConfig, decode_image
from vqclip.data.decode import MAX_PIXELS
from vqclip.data.samples import read_decoded
from vqclip.errors import VqclipError
from vqclip.towers import TimmTowerConfig
from vqclip.train import TrainConfig

GIB = 1 << 30
LIMIT_MB = 300


def hole(path: Path, start: bytes, size: int) -> Path:
    """A file that begins so, and has ``size`` bytes, most of which take no room on the disk."""
    path.write_bytes(start)
    os.truncate(path, size)
    return path


def put(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def huge_caption(path: Path) -> Path:
    """A good tar whose second sample has a caption of 1 GiB of zeros, as holes."""
    start = tar_bytes(caption_members(0, 1) | {"bad.jpg": encode(pixels(0)), "bad.txt": b""}).partition(b"bad.txt")[0]
    info = tarfile.TarInfo("bad.txt")
    info.size = GIB
    return hole(path, start + info.tobuf(tarfile.USTAR_FORMAT), GIB + (1 << 20))


def shard(path: Path) -> None:
    """Read all samples; the error names what is wrong with each."""
    source, problems = CaptionShardsConfig(path=str(path)).build(), []
    for index in range(len(source)):
        try:
            read_decoded(source, index, MAX_PIXELS)
        except VqclipError as error:
            problems.append(str(error))
    raise VqclipError(" | ".join(problems))


def tower(path: Path | None = None) -> Any:
    args = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    return TimmTowerConfig(name="vit_tiny_patch16_224", image_size=16, args=args, checkpoint=path).build()


READ: dict[str, Callable[[Path], object]] = {
    "shard": shard,
    "classes": lambda path: ClassShardsConfig(path=path).build(),
    "image": lambda path: decode_image(path.read_bytes()),
    "folder": lambda path: FolderConfig(path=path).build().read(0),
    "config": lambda path: load_config(TrainConfig, path),
    "checkpoint": checkpoint.load,
    "tokenizer": lambda path: vqclip.load_tokenizer(path, modality="image"),
    "tower": tower,
}


def peak() -> float:
    """MB; `resource.getrusage` would count the peak of the process that started this one as well."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def read_all(root: Path) -> None:
    """Read the cases in a process of its own; print what each said, and by how much the peak has grown then."""
    READ["tokenizer"](root / "good tokenizer")
    for kind, name in (("shard", "good.tar"), ("tower", "missing.pt")):
        with contextlib.suppress(VqclipError):
            READ[kind](root / name)
    for name in ("good.jpg", "good.png"):
        READ["image"](root / name)
    before, found = peak(), []
    for kind, path in json.loads((root / "cases.json").read_text()):
        try:
            READ[kind](Path(path))
            said = "was read"
        except VqclipError as error:
            said = str(error)
        found.append([path, said, peak() - before])
    print(json.dumps(found))


def packed_weights(path: Path) -> Path:
    """PyTorch's zip, its numbers compressed: 256 MiB of zeros in one."""
    torch.save({"a": torch.zeros(1)}, path)
    with zipfile.ZipFile(path) as stored:
        parts = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name, data in parts.items():
            packed.writestr(name, data)
        with packed.open("archive/data/1", "w", force_zip64=True) as target:
            for _ in range(256):
                target.write(bytes(1 << 20))
    return path


def crafted(root: Path, marker: Path) -> list[tuple[str, Path, str]]:
    """Kind of reader, file, and what is said of it (a pattern)."""
    evil = hostile.marking_pickle(marker)
    good = tiny_model().build()
    good.save_pretrained(root / "good tokenizer")
    write_tar(root / "good.tar", caption_members(0, 3))
    put(root / "good.jpg", encode(pixels(0)))
    put(root / "good.png", encode(pixels(0), "PNG"))

    members = caption_members(0, 1) | {"0.pkl": evil, "1.pth": evil, "bad.jpg": evil, "bad.txt": b"x"}
    foreign = r"sample bad: not a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF image: begins with b'\\x80\\x04"
    short = "truncated: member '000000000.txt' at offset 0 needs 1073742336 bytes, the file has 10240"
    sparse, boast, gz = (root / f"{name}.tar" for name in ("sparse", "boast", "gz"))
    tars = [
        ("shard", write_tar(root / "pickle.tar", members), foreign),
        ("shard", hostile.sparse_tar(sparse, GIB), "member '000000000.txt' at offset 0 is a sparse file; only"),
        ("shard", hostile.boastful_tar(boast, GIB), short),
        ("shard", hostile.gzip_bomb_tar(gz, GIB), r"no valid tar header at offset 0, but b'\\x1f"),
        ("shard", huge_caption(root / "txt.tar"), r"sample bad: txt of 1073741824 bytes; at most 1048576"),
    ]
    assert all(path.stat().st_size <= 10_240 for _, path, _ in tars[1:4])

    huge, bomb = (
        " image of 20000x20000 pixels; at most 50000000 ",
        "png image cannot be decoded: Decompressed data too ",
    )
    images = [
        ("image", put(root / "20000.png", hostile.huge_png(20_000)), "png" + huge),
        ("image", put(root / "20000.jpg", hostile.huge_jpeg(20_000)), "jpeg" + huge),
        ("image", put(root / "text.png", hostile.text_bomb_png()), bomb),
        ("image", put(root / "profile.png", hostile.profile_bomb_png()), bomb),
        ("image", put(root / "lying.webp", hostile.lying_webp(6000)), "webp image cannot be decoded: "),
    ]
    for name in ("cat", "dog"):
        (root / "pictures" / name).mkdir(parents=True)
        hole(root / "pictures" / name / "1.jpg", b"\xff\xd8\xff", GIB)
    classes = class_folder(root / "classes")
    hole(classes / "classnames.txt", b"cat\n", GIB)

    laughs = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    many, deep = "more than 20000 values; a configuration is smaller", "data: " + "[" * 100_000
    block = "\n".join(" " * n + "a:" for n in range(400))
    digits = "run: {seed: 0x" + "f" * 200_000 + "}"
    configs = [
        ("config", put(root / "laughs.yaml", "\n".join(laughs)), many),
        ("config", put(root / "deep.yaml", deep), "nested too deeply; a configuration has at most 64 levels"),
        ("config", put(root / "block.yaml", block), "more than 64 levels; a configuration is smaller"),
        ("config", put(root / "long.yaml", "data:\n" + "- a\n" * 60_000), many),
        ("config", put(root / "digits.yaml", digits), "run.seed: .* an integer of 200002 digits; at most 100 are read"),
        ("config", hole(root / "zeros.yaml", b"a: 1\n", GIB), "more than 1048576 bytes; a configuration has fewer"),
    ]

    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    saved = save_checkpoint(root / "checkpoints", 1, optimizer)
    (saved / "model" / "optimizer.pt").write_bytes(evil)

    hub = root / "hub"
    hub.mkdir()
    (hub / "pytorch_model.bin").write_bytes(evil)
    only, disguised, header, fat = (root / name for name in ("only", "disguised", "header", "fat"))
    for folder in (only, disguised, header, fat):
        good.save_pretrained(folder)
    (only / "model.safetensors").unlink()
    (only / "pytorch_model.bin").write_bytes(evil)
    for folder, data in ((disguised, evil), (header, (1 << 62).to_bytes(8, "little") + b"{}")):
        (folder / "model.safetensors").write_bytes(data)
        reseal(folder)
    hole(fat / "config.json", b"{", GIB)
    folders = [
        ("checkpoint", saved, r"files not in manifest\.json: \['model/optimizer\.pt'\]"),
        ("tokenizer", hub, "expected a tokenizer folder .*pickled files are never opened, .*: pytorch_model.bin"),
        ("tokenizer", only, "model.safetensors: no such file; pickled files are never opened, .*: pytorch_model.bin"),
        ("tokenizer", disguised, "model.safetensors: cannot be read, damaged or cut short: .*eader"),
        ("tokenizer", header, "model.safetensors: cannot be read, damaged or cut short: .*eader"),
        ("tokenizer", fat, "config.json: more than 67108864 bytes, which are not read"),
    ]

    (root / "evil.pt").write_bytes(evil)
    (root / "evil.safetensors").write_bytes(evil)
    torch.save({"a": hostile.Marker(marker)}, root / "zipped.pt")
    torch.save({"a": hostile.Marker(marker)}, root / "legacy.pt", _use_new_zipfile_serialization=False)
    state = dict(tower().backbone.model.state_dict())
    wide = state | {"norm.weight": torch.zeros(1, dtype=torch.half).expand(1 << 40)}
    torch.save(wide, root / "wide.pt")
    towers = [
        ("tower", root / "evil.pt", "evil.pt cannot be read: it is damaged, or contains more than tensors"),
        ("tower", root / "evil.safetensors", "evil.safetensors cannot be read: SafetensorError: .*eader"),
        ("tower", root / "zipped.pt", "zipped.pt cannot be read: it is damaged, or contains more than tensors"),
        ("tower", root / "legacy.pt", "legacy.pt cannot be read: it is damaged, or contains more than tensors"),
        ("tower", root / "wide.pt", r"norm.weight: got shape \(1099511627776,\), expected \(16,\)"),
        ("tower", packed_weights(root / "packed.pt"), r"its parts claim to unpack to 26\d+ bytes, from a file of \d+"),
    ]
    others = [
        ("folder", root / "pictures", "1.jpg: image of 1073741824 bytes; at most 67108864 are read"),
        ("classes", classes, "classnames.txt: more than 4194304 bytes; expected one class name a line"),
    ]
    return [*tars, *images, *configs, *folders, *towers, *others]


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_everything_is_refused_by_name_in_little_memory(tmp_path: Path) -> None:
    """One process reads them all, so that its peak is the largest of theirs."""
    marker = tmp_path / "was here"
    cases = crafted(tmp_path, marker)
    (tmp_path / "cases.json").write_text(json.dumps([[kind, str(path)] for kind, path, _ in cases]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_hostile", str(tmp_path)],
        env={**os.environ, "VQCLIP_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for (_, path, pattern), (_, message, growth) in zip(cases, found, strict=True):
        assert re.search(pattern, message, re.DOTALL), f"{path}: {message[:300]}"
        print(f"{path.name}: {growth:.1f} MB")
        assert growth < LIMIT_MB, f"{path}: {growth:.0f} MB above the baseline"
    assert not marker.exists()


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
