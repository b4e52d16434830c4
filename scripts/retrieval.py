"""Image-text retrieval with a trained model; the same as ``vqclip evaluate retrieval``."""

import sys

from vqclip.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", "retrieval", *sys.argv[1:]]))
