"""Installs the device if it is imported before torch, as in a forkserver."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fake_cuda import device

own = device.install(Path(os.environ["FAKE_CUDA_LIBRARY"]))
