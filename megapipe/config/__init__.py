"""The configuration of a run: sections, their keys, presets and files."""
