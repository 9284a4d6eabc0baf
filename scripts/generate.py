"""Text from a checkpoint; ``python scripts/generate.py --help`` says how."""

import sys

from megapipe.command_line import load_torch, quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        load_torch()
        from megapipe.generate.command import main

        sys.exit(main())
