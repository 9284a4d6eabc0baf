"""Data ahead of a run; ``python scripts/prepare_data.py --help`` says how."""

import sys

from megapipe.data.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
