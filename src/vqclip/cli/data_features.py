"""``vqclip data features``: store the features of a run's frozen towers before it starts.

The run finds them and starts at once. With --engine ray they are computed on a cluster, whose machines share the folder
data.feature_cache.folder and have the kind of device that the run will have.
"""

from __future__ import annotations

import argparse

from vqclip.cli import arguments as types
from vqclip.cli.engine import add_engine, ray_options
from vqclip.train.fill_features import fill_features, fill_features_on_ray
from vqclip.train.tasks.kinds import load_task_config

__all__ = ["EXAMPLES", "configure", "run"]

EXAMPLES = """\
examples:
  vqclip data features --config configs/pretrained.yaml
  vqclip data features --config configs/pretrained.yaml data.feature_cache.folder=/shared/features --engine ray
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--config", type=types.path, required=True, metavar="FILE", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the file")
    add_engine(parser)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    ray = ray_options(options)
    config = load_task_config(options.config, options.overrides)
    if ray is None:
        fill_features(config)
    else:
        print(fill_features_on_ray(config, ray), flush=True)
