"""How experts are split over ranks: the section `experts`, resolved and checked."""
