"""Expert maps: which ranks hold each expert, policies that change the maps, and their costs."""
