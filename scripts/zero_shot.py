"""Zero-shot classification with a trained model: continuous, quantized and codes-only figures beside chance.

python scripts/zero_shot.py runs/base --kind scenes
python scripts/zero_shot.py runs/eurosat --data path/to/cls_eurosat
python scripts/zero_shot.py runs/base --data path/to/folder_of_class_folders --template "a photo of a {c}"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _shared import main, options

from vqclip.cli import arguments as types
from vqclip.errors import ConfigError
from vqclip.evaluation import ClassesData, ImageFolderData, LabelledData, ScenesClassesData, ZeroShotConfig


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = options(__doc__)
    parser.add_argument("--data", type=types.path, help="folder of the data; not for --kind scenes")
    parser.add_argument(
        "--kind",
        choices=("classes", "folder", "scenes"),
        help="classes: clip_benchmark layout (classnames.txt, <split>/*.tar); folder: one subfolder of images a class; "
        "scenes: the drawn data set. Left out: classes if there is a classnames.txt or a tar, else folder",
    )
    parser.add_argument(
        "--split", help="folder in --data of this split (classes: test; folder: none); scenes: test or heldout (test)"
    )
    parser.add_argument(
        "--template", type=types.text, action="append", help="prompt with {c} for the class; repeat for several"
    )
    return parser.parse_args()


def make_task(arguments: argparse.Namespace) -> ZeroShotConfig:
    """The evaluation that the command line asks for."""
    data = make_data(arguments)
    return ZeroShotConfig(
        name=f"scenes {data.split}" if isinstance(data, ScenesClassesData) else Path(data.path).name,
        data=data,
        templates=tuple(arguments.template or ()),
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        limit=arguments.limit,
        max_bad_fraction=arguments.bad_fraction,
    )


def make_data(arguments: argparse.Namespace) -> LabelledData:
    """The data that the command line asks for."""
    if arguments.kind == "scenes":
        if arguments.data is not None:
            raise ConfigError("--data: not for --kind scenes, which is drawn; set VQCLIP_CACHE to say where")
        return ScenesClassesData(split=arguments.split or "test")
    if arguments.data is None:
        raise ConfigError("--data: missing; expected a folder of labelled images, or --kind scenes")
    path = arguments.data.expanduser().absolute()
    has_shards = (path / "classnames.txt").exists() or any(path.glob("*.tar")) or any(path.glob("*/*.tar"))
    kind = arguments.kind or ("classes" if has_shards else "folder")
    if kind == "folder":
        return ImageFolderData(path=path / (arguments.split or ""))
    if arguments.kind is None and not any((folder / "classnames.txt").exists() for folder in (path, path.parent)):
        raise ConfigError(
            f"--data: {path} holds tars but no classnames.txt; expected labelled images. scripts/retrieval.py "
            "evaluates shards of captioned images"
        )
    return ClassesData(path=path, split="test" if arguments.split is None else arguments.split)


if __name__ == "__main__":
    sys.exit(main(parse(), make_task))
