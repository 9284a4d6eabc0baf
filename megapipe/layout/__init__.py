"""Decides all that a configuration determines before a process group exists. No torch."""
