"""The parts of a training step: data, computation, totals, validation of the update."""
