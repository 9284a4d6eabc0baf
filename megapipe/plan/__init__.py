"""What a run will cost, worked out before it starts: parameters, FLOPs, and the printed plan."""
