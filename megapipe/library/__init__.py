"""megapipe as a library: what ``import megapipe`` offers, for scripts and notebooks."""
