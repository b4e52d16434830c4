"""Modules that most ranks need; the server that ranks are forked from imports them once (see `tests.ranks`)."""

import tests.training
import vqclip.cli.train

__all__ = ["tests", "vqclip"]
