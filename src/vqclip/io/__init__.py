"""Safe files: atomic writes, JSON with a checksum, tensors without pickle, locks.

The first package: it imports `vqclip.errors` alone, and every package that touches the disk uses it.
"""
