"""Measures a checkpoint's model; ``python scripts/evaluate.py --help`` says how."""

import sys

from megapipe.evaluate.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
