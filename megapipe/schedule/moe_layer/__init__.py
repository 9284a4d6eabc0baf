"""Layers with experts as tasks on a device and its links: timed, and put in order."""
