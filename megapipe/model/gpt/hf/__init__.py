"""Weights and configurations of Hugging Face's classes, both ways: a family is a row of a table."""
