"""No-flush training, where operations read stale weights."""
