"""Loaded by the server that processes of tests are forks of, while a whole run is recorded: ranks
inherit a hook that notes each compiler."""

import os

from tests.running.compilers import note_compilers, note_of

note_compilers(note_of(os.getppid()))
