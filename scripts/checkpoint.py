"""The checkpoints of a run; ``python scripts/checkpoint.py --help`` says what can be done."""

import sys

from megapipe.command_line import load_torch, quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        load_torch()
        from megapipe.checkpoint.commands import main

        sys.exit(main(sys.argv[1:]))
