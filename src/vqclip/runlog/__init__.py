"""What a run leaves for people to read."""

from vqclip.runlog.log import MetricsLog, read_metrics

__all__ = ["MetricsLog", "read_metrics"]
