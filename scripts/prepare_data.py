"""Tokenize a corpus ahead of a run; ``python scripts/prepare_data.py --help`` says how."""

import sys

from megapipe.data.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
