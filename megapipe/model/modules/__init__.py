"""A model of the user's: a function that returns its layers, as plain modules."""
