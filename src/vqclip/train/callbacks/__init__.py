"""Callbacks: everything that happens between two training steps. See `Callback` for how to write one."""

from vqclip.train.callbacks.base import Callback, Training
from vqclip.train.callbacks.builtin import in_order

__all__ = ["Callback", "Training", "in_order"]
