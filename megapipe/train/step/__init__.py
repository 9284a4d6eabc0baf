"""One training step, in parts."""
