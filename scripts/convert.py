"""Models to Hugging Face's form and back; ``python scripts/convert.py --help`` says how."""

import sys

from megapipe.command_line import load_torch, quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        load_torch()
        from megapipe.convert.commands import main

        sys.exit(main(sys.argv[1:]))
