"""Measure a checkpoint's model; ``python scripts/evaluate.py --help`` says how."""

import sys

from megapipe.command_line import load_torch, quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        load_torch()
        from megapipe.evaluate.commands import main

        sys.exit(main(sys.argv[1:]))
