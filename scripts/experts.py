"""MoE layers: ``python scripts/experts.py --help``, and docs/moe.md."""

import sys

from megapipe.command_line import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.plan.moe.commands import main

        sys.exit(main(sys.argv[1:]))
