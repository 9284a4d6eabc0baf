"""Resolves and checks a configuration before process groups exist. Loads no torch."""
