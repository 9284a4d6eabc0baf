"""Hides all objects that are there when it is imported from the collector of garbage, as a server
does before it forks: a fork that collects would otherwise write to each, and so copy its memory."""

import gc

gc.collect()
gc.freeze()
