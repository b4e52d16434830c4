"""Image-text retrieval with a trained model: continuous, quantized and codes-only R@1, 5 and 10 beside chance.

python scripts/retrieval.py runs/base --kind scenes
python scripts/retrieval.py runs/captions --data path/to/val
python scripts/retrieval.py runs/captions --data "val/{00000..00003}.tar" --captions json --json-key caption
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _shared import main, options

from vqclip.cli import arguments as types
from vqclip.errors import ConfigError
from vqclip.evaluation import CaptionedData, CaptionsData, RetrievalConfig, ScenesCaptionsData


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = options(__doc__)
    parser.add_argument(
        "--data", type=types.text, nargs="+", help="folder of tars, tar or pattern; not for --kind scenes"
    )
    parser.add_argument(
        "--kind", choices=("shards", "scenes"), default="shards", help="caption shards, or drawn scenes"
    )
    parser.add_argument(
        "--captions",
        choices=("txt", "txt_lines", "json"),
        default="txt",
        help="txt: the .txt is the caption; txt_lines: each of its lines is one; json: see --json-key",
    )
    parser.add_argument(
        "--json-key", type=types.text, action="append", help="key of the .json with a caption or a list (caption)"
    )
    return parser.parse_args()


def make_task(arguments: argparse.Namespace) -> RetrievalConfig:
    """The evaluation that the command line asks for."""
    return RetrievalConfig(
        name="scenes val" if arguments.kind == "scenes" else " ".join(Path(path).name for path in arguments.data or ()),
        data=make_data(arguments),
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        limit=arguments.limit,
        max_bad_fraction=arguments.bad_fraction,
    )


def make_data(arguments: argparse.Namespace) -> CaptionedData:
    """The data that the command line asks for."""
    if arguments.kind == "scenes":
        if arguments.data:
            raise ConfigError("--data: not for --kind scenes, which is drawn; set VQCLIP_CACHE to say where")
        return ScenesCaptionsData()
    if not arguments.data:
        raise ConfigError("--data: missing; expected caption shards, or --kind scenes")
    for path in arguments.data:
        if (Path(path) / "classnames.txt").exists():
            raise ConfigError(
                f"--data: {path} holds labelled images (classnames.txt); expected caption shards. scripts/zero_shot.py "
                "evaluates labelled images"
            )
    keys = tuple(arguments.json_key or ("caption",))
    return CaptionsData(path=tuple(arguments.data), captions=arguments.captions, json_keys=keys)


if __name__ == "__main__":
    sys.exit(main(parse(), make_task))
