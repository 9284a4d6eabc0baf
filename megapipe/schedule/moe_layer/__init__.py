"""Timing of an MoE layer as tasks on a device and its links, and search for their best order."""
