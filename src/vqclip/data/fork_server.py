"""Preparation of the process that workers are forked from under ``forkserver``; imported there, and nowhere else.

It imports once what all workers need. If it ended at a signal that asks to stop, which a launcher sends to all
processes of a job, the workers would count as dead before the step is finished and saved.
"""

from __future__ import annotations

import vqclip.data.loader  # noqa: F401
from vqclip.process.signals import ignore_stop_signals

ignore_stop_signals()
