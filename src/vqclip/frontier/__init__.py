"""Accuracy against bits of several runs: prefixes of their ids, configurations, seeds; as a table, a plot and files.

After training, whose runs it makes and reads; before the commands.

    from vqclip.frontier import frontier, save, train_seeds

    runs = train_seeds(["few.yaml", "many.yaml"], seeds=(0, 1, 2))
    found = frontier(runs)
    print(found)
    save(found, "figures")
"""

from vqclip.frontier.files import save
from vqclip.frontier.measure import frontier
from vqclip.frontier.points import Frontier, Point
from vqclip.frontier.training import train_seeds

__all__ = ["Frontier", "Point", "frontier", "save", "train_seeds"]
