"""``python -m vqclip.train``, and ``torchrun ... -m vqclip.train``."""

import sys

from vqclip.cli.main import main

if __name__ == "__main__":  # not in the data workers of a platform that spawns them
    sys.exit(main(["train", *sys.argv[1:]]))
