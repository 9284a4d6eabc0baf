"""Layers with experts: ``python scripts/experts.py --help``, and docs/moe.md."""

import sys

from megapipe.plan.expert_commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
