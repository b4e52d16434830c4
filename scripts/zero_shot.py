"""Zero-shot classification with a trained model; the same as ``vqclip evaluate zero-shot``."""

import sys

from vqclip.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", "zero-shot", *sys.argv[1:]]))
