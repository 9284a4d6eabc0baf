"""Layers whose weights are split over the tensor-parallel axis (Shoeybi et al., 1909.08053)."""
