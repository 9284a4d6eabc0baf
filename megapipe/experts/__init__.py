"""Which ranks have the experts of a layer, as data: maps, policies that change them, their cost."""
