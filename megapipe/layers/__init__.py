"""Layers that split their own backward, cut over tensor-parallel ranks (Shoeybi, 1909.08053)."""
