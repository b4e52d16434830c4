"""Layers: attention, pooling, projection, temperature, precision, checks of inputs.

After `vqclip.config`; before towers, quantizers and losses, which are made of them.
"""
