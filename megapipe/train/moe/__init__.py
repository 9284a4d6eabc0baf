"""Training of layers with experts: statistics, state of routing, experts that change ranks."""
