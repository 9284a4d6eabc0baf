"""User-defined models: a function that returns the layers as plain torch modules."""
