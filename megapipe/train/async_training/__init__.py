"""Training without a flush, where operations read stale weights."""
