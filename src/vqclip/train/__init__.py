"""Training: configuration, step, loop, callbacks, guards, checkpoints of a run.

After the model, its data, its losses and `vqclip.runlog`; before `vqclip.cli`.

    from vqclip.train import TrainConfig, run

    summary = run(load_config(TrainConfig, "configs/base.yaml"))
"""

from vqclip.train.callbacks import Callback, Training
from vqclip.train.config import TrainConfig
from vqclip.train.main import run
from vqclip.train.summary import RunSummary

__all__ = ["Callback", "RunSummary", "TrainConfig", "Training", "run"]
