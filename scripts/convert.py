"""Models to Hugging Face's form and back; ``python scripts/convert.py --help`` says how."""

import sys

from megapipe.convert.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
