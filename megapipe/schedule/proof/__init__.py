"""Proves that a schedule can be executed, or says which operation forbids it."""
