"""``python -m megapipe.launch``; see :mod:`megapipe.launch.launcher`."""

import sys

from megapipe.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
