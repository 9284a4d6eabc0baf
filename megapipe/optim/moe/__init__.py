"""Migration of the optimizer state of experts that change their owners."""
