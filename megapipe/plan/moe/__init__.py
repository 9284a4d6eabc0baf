"""Plans of layers with experts: how rows travel, its time, and which ranks have which experts."""
