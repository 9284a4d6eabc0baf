"""Examples that stand beside the package: they import it, and it does not import them."""
