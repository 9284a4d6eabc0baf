"""MoE layers of a GPT."""
