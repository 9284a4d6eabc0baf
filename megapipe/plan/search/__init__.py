"""Search for the fastest layout of a model on a number of devices: ``megapipe plan``."""
