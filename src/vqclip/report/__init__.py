"""The page of a run, ``report.html``, and the drawings that it shares with ``vqclip demo``."""
