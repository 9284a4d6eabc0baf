"""Pipeline schedules: ``python scripts/schedule.py --help``; docs/schedules.md explains."""

import sys

from megapipe.schedule.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
