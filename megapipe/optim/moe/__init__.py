"""Optimizer state of experts that change their owners."""
