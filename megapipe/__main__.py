"""Makes ``python -m megapipe`` the same program as the console command ``megapipe``."""

import sys

from megapipe.console import main

if __name__ == "__main__":
    sys.exit(main())
