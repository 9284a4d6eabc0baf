"""The cost of a run, worked out before it starts: memory, traffic, time, and the printed plan."""
