"""Going on from a checkpoint: which one, under which changes of keys."""
