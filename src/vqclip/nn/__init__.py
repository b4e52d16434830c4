"""Layers: attention, pooling, projection, temperature, precision, checks of inputs.

After `vqclip.config`; before the towers, quantizers and losses, which use them.
"""
