"""The log of a run: metrics, events, the progress bar, the console, bad samples, the best step.

After `vqclip.evaluation`, whose figures it records; before `vqclip.train`.
"""
