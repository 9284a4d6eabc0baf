"""Data ahead of a run; ``python scripts/prepare_data.py --help`` says how."""

import sys

from megapipe.command_line import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.data.commands import main

        sys.exit(main(sys.argv[1:]))
