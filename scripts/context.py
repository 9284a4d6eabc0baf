"""Attention over split positions: ``python scripts/context.py --help``, and docs/context.md."""

import sys

from megapipe.plan.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
