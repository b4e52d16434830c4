"""vqclip models in other programs, one module each; the program is imported only by its module, on first use.

After training, whose runs and checkpoints can be loaded; before the commands.
"""
