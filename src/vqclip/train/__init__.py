"""Training: configuration, step, loop, what guards a run, and what a resumed run continues from.

After the model, its data and its losses; before `vqclip.cli`. `run` trains a configuration:

    from vqclip.train import TrainConfig, run
    summary = run(load_config(TrainConfig, "configs/base.yaml"))
"""

from vqclip.train.config import TrainConfig
from vqclip.train.main import run

__all__ = ["TrainConfig", "run"]
