"""Report what this machine offers a run: ``python scripts/doctor.py --help``."""

import sys

from megapipe.command_line import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.launch.doctor import main

        sys.exit(main(sys.argv[1:]))
