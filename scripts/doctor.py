"""Tells what this machine gives a run: ``python scripts/doctor.py --help``."""

import sys

from megapipe.launch.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
