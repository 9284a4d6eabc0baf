"""MoE layers: routing, dispatch, expert products and combine."""
