"""Checkpoints: written aside, hashed, synced and renamed; read back bit for bit, or refused. No pickle anywhere.

    checkpoints/step-00001000/
      model/                   whatever ``write_model`` puts there, e.g. a tokenizer folder that loads by itself
      optimizer.json           parameter groups: names, shapes, dtypes, options
      optimizer.safetensors    every tensor of the optimizer's state, named ``<parameter>/<key>``
      state.json               the caller's JSON-able state
      state.safetensors        the tensors of it, if it has any
      manifest.json            size and SHA-256 of each file, and of itself

One process writes (the caller decides which), in a thread of its own where it has better things to do; any number may
read.
"""

from vqclip.checkpoint.background import Staging, Writer
from vqclip.checkpoint.folders import (
    checkpoint_name,
    checkpoints,
    latest,
    set_aside_newer,
    step_of,
    use_latest,
    verify,
)
from vqclip.checkpoint.optimizer import OptimizerState, optimizer_tensors, pack_optimizer, restore_optimizer
from vqclip.checkpoint.store import Checkpoint, load, save

__all__ = [
    "Checkpoint",
    "OptimizerState",
    "Staging",
    "Writer",
    "checkpoint_name",
    "checkpoints",
    "latest",
    "load",
    "optimizer_tensors",
    "pack_optimizer",
    "restore_optimizer",
    "save",
    "set_aside_newer",
    "step_of",
    "use_latest",
    "verify",
]
