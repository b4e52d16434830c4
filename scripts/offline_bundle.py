"""Pack the project and the wheels that a machine with a GPU but without a network is likely to lack, at most 60 MiB.

    python scripts/offline_bundle.py --python 3.12       # vqclip-offline.tar.gz

The wheels are those of vqclip and of its tests in this environment, with all that they need, but PRESENT and what only
those need. docs/gpu.md says how to install them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PRESENT = {"torch", "torchvision", "timm", "numpy", "safetensors", "einops", "tensorboard"}
"""Packages of images for GPUs."""
PLATFORMS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1"]
MOST_BYTES = 60 * 2**20


def collect_versions(name: str, extras: frozenset[str], python: str, found: dict[str, str]) -> None:
    """Add the versions of an installed package and of all that it needs to ``found``."""
    name = canonicalize_name(name)
    if name in PRESENT or (name in found and not extras):
        return
    try:
        found[name], requirements = importlib.metadata.version(name), importlib.metadata.requires(name)
    except importlib.metadata.PackageNotFoundError:  # a package for another version of Python: the newest one
        found[name], requirements = "", None
    for text in requirements or ():
        requirement = Requirement(text)
        settings = [
            {"python_version": python, "python_full_version": f"{python}.0", "extra": each} for each in extras or [""]
        ]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in settings):
            collect_versions(requirement.name, frozenset(requirement.extras), python, found)


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version on the other machine")
    parser.add_argument("--machine", default="x86_64", help="its processor: x86_64 or aarch64")
    parser.add_argument("--out", type=Path, default=Path("vqclip-offline.tar.gz"))
    args = parser.parse_args()
    root, found = Path(__file__).parents[1], dict[str, str]()
    collect_versions("vqclip", frozenset({"test-gpu"}), args.python, found)
    del found["vqclip"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", args.python, "--implementation", "cp", "--dest", folder]
        command += [word for each in PLATFORMS for word in ("--platform", f"{each}_{args.machine}")]
        wheels = [f"{name}=={version}" if version else name for name, version in found.items()]
        subprocess.run([*command, *wheels], check=True)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(root)]
        subprocess.run(build, check=True)
        files = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout
        with tarfile.open(args.out, "w:gz") as archive:
            for file in files.splitlines():
                archive.add(root / file, f"vqclip-offline/{file}")
            archive.add(folder, "vqclip-offline/wheels")
    size = args.out.stat().st_size
    print(f"{args.out}: {size / 2**20:.1f} MiB, {len(found) + 1} wheels for Python {args.python}, {args.machine}")
    if size > MOST_BYTES:
        raise SystemExit(f"got {size / 2**20:.1f} MiB, expected at most {MOST_BYTES >> 20}")


if __name__ == "__main__":
    main()
