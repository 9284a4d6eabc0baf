"""Axes, mesh and collectives: the only owner of ranks and process groups."""
