"""Modules that most ranks need; the server that ranks are forked from imports them once (see `tests.ranks`)."""

import open_clip
import timm
import torch.utils.tensorboard  # as timm and open_clip, imported by the first run of a process: 2 seconds in each

import tests.training
import vqclip.train.main
import vqclip.train.tasks.kinds

__all__ = ["open_clip", "tests", "timm", "torch", "vqclip"]
