"""The configuration of a run: its sections, their keys, presets and files."""
