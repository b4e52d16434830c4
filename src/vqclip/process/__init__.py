"""Staying alive: signals, the watchdog, stack dumps, progress, the lock of a run, malloc settings.

After `vqclip.dist`, whose collectives the watchdog reports; before everything that runs for long.
"""
