"""The parts of gpu_ladder.py: what is run, on which side, and what is written down."""
