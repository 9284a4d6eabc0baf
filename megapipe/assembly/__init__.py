"""Parts of a stage that a configuration, a layout and a mesh decide together."""
