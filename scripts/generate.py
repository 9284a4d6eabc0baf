"""Text from a checkpoint; ``python scripts/generate.py --help`` says how."""

import sys

from megapipe.command_line import load, quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        load("torch")
        from megapipe.generate.command import main

        sys.exit(main())
