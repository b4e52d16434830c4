"""Long-running processes: stop signals, watchdog, stack dumps, heartbeat, run lock, malloc settings.

After `vqclip.dist`, whose collectives the watchdog reports; before `vqclip.data` and every other long computation.
"""
