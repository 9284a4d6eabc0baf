"""Weights and configurations of Hugging Face classes, read and written with one table."""
