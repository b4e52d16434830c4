"""``vqclip data``: pack, check and show data of any kind.

After `vqclip.train`, whose configurations `show` takes; before `vqclip.cli`.
"""
