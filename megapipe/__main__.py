"""``python -m megapipe train quickstart`` is the console command ``megapipe train quickstart``."""

import sys

from megapipe.console import main

if __name__ == "__main__":
    sys.exit(main())
