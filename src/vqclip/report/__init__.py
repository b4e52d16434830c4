"""The page of a run, ``report.html``: figures, curves, codes on images, and a verdict in plain words.

After `vqclip.runlog`, whose files it reads; before `vqclip.train`, which writes the page at every evaluation.
`vqclip.demo` draws its code maps with `vqclip.report.code_maps`.
"""

from vqclip.report.page import write_report

__all__ = ["write_report"]
