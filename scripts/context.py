"""Attention over split positions: ``python scripts/context.py --help``, and docs/context.md."""

import sys

from megapipe.command_line import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.plan.commands import main

        sys.exit(main(sys.argv[1:]))
