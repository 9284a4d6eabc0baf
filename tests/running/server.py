"""Loaded by the server that processes of tests are forks of, while a whole run is recorded: ranks
inherit a hook that notes that they compile."""

import os

from tests.running.compilers import note_compilation, note_of

note_compilation(note_of(os.getppid()))
