"""Resuming from a checkpoint: which checkpoint, and which changed settings are allowed."""
