"""The launcher of a campaign's job: ``python -m megapipe.launch`` with a fault in the ranks of
train.py, which are forked from it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megapipe.launch.launcher import main
from tests.campaigns.planned import add_fault

if __name__ == "__main__":
    add_fault()
    sys.exit(main(sys.argv[1:]))
