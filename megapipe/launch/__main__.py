"""``python -m megapipe.launch``; see :mod:`megapipe.launch.launcher`."""

import sys

from megapipe.command_line import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.launch.launcher import main

        sys.exit(main(sys.argv[1:]))
