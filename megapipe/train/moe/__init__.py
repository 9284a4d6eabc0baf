"""Training of MoE layers: statistics, routing state, experts that change ranks."""
