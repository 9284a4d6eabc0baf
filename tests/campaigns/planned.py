"""The callbacks of a rank that a launcher has started: the fault that is planned."""

import os
from pathlib import Path

from tests.campaigns.rank import PLAN, planned

callbacks = planned(Path(os.environ[PLAN]))
