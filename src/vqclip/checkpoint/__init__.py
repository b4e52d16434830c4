"""Checkpoints: written to a temporary folder, hashed, synced and renamed; read back bit for bit or refused. No pickle.

After `vqclip.io`, which writes the files; before `vqclip.train`, which decides what a checkpoint contains.

    checkpoints/step-00001000/
      model/                   tensors of the model and its other files; such as a tokenizer folder
      optimizer.json           parameter groups: names, shapes, dtypes, options
      optimizer.safetensors    every tensor of the optimizer's state, named ``<parameter>/<key>``
      state.json               the caller's JSON-able state
      state.safetensors        its tensors
      manifest.json            size and SHA-256 of each file, and of itself

One process writes, if it likes in a background thread, or several their parts of the tensors (`vqclip.io.parts`); any
number may read.
"""

from vqclip.checkpoint.folders import (
    MODEL,
    STATE_FILE,
    Checkpoint,
    checkpoint_name,
    checkpoints,
    latest,
    load,
    save,
    set_aside_newer,
    sort_checkpoints,
    step_of,
    unfinished_path,
    use_latest,
    verify,
)
from vqclip.checkpoint.optimizer import (
    OPTIMIZER_FILE,
    first_state,
    optimizer_tensors,
    probe_of,
    read_optimizer,
    restore_optimizer,
    state_bytes,
    write_layout,
)

__all__ = [
    "MODEL",
    "OPTIMIZER_FILE",
    "STATE_FILE",
    "Checkpoint",
    "checkpoint_name",
    "checkpoints",
    "first_state",
    "latest",
    "load",
    "optimizer_tensors",
    "probe_of",
    "read_optimizer",
    "restore_optimizer",
    "save",
    "set_aside_newer",
    "sort_checkpoints",
    "state_bytes",
    "step_of",
    "unfinished_path",
    "use_latest",
    "verify",
    "write_layout",
]
