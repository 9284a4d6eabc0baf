"""The cost of a run, computed before it starts: memory, traffic, time, and the printed plan."""
