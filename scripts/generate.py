"""Text from a checkpoint; ``python scripts/generate.py --help`` says how."""

import sys

from megapipe.generate.command import main

if __name__ == "__main__":
    sys.exit(main())
