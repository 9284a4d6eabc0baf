"""The fastest layout: ``python scripts/plan.py --help``, and docs/planning.md."""

import sys

from megapipe.command_line import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.plan.search.command import main

        sys.exit(main(sys.argv[1:]))
