"""Zero-shot classification with a trained model; the same as ``vqclip evaluate zero-shot``."""

import sys

from vqclip.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main(["zero-shot", *sys.argv[1:]]))
