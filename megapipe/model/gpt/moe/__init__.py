"""Layers of a GPT with experts."""
