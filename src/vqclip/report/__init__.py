"""The page of a run, ``report.html``: figures, curves, codes on images, and a verdict in plain words.

After `vqclip.runlog`, whose files it reads; before `vqclip.train`, which writes the page at every evaluation.
"""

from vqclip.report.page import REPORT_FILE, write_comparison, write_report

__all__ = ["REPORT_FILE", "write_comparison", "write_report"]
