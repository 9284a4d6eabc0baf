"""The version of megapipe, and the folder of its package."""

from pathlib import Path

__version__ = "0.2.0"
PACKAGE = Path(__file__).parent
"""The folder of the package."""
