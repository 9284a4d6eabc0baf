"""Layers with experts: routing, dispatch, products and combine."""
