"""From a configuration to everything that is decided before a process group exists. No torch."""
