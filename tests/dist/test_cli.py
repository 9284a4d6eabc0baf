"""Modules that the command line loads before it knows the configuration."""

import subprocess
import sys


def test_imports_no_torch() -> None:
    code = (
        "import sys, megapipe.cli, megapipe.layout.layout, megapipe.plan.report; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
