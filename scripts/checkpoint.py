"""The checkpoints of a run; ``python scripts/checkpoint.py --help`` says what can be done."""

import sys

from megapipe.checkpoint.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
