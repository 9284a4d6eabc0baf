"""Axes, mesh and collectives; all ranks and process groups are made in this package."""
