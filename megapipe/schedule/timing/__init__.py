"""When operations, messages and collectives of a schedule begin and end under given costs."""
