"""Resolves and checks the section `experts`: how experts are split over ranks."""
