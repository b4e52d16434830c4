"""Training: configuration, step, loop, callbacks, guards, checkpoints of a run.

After the model, its data, its losses and `vqclip.runlog`; before `vqclip.cli`.

    from vqclip.train import run

    result = run("configs/base.yaml", overrides=["run.name=mine"])
"""

from vqclip.train.callbacks import Callback, Training
from vqclip.train.main import RunResult, run
from vqclip.train.summary import RunSummary
from vqclip.train.tasks.contrastive import TrainConfig

__all__ = ["Callback", "RunResult", "RunSummary", "TrainConfig", "Training", "run"]
