"""Hides all existing objects from the garbage collector when it is imported, as a server does
before it forks. A fork that collects would otherwise write to each object, and so copy its
memory."""

import gc

gc.collect()
gc.freeze()
