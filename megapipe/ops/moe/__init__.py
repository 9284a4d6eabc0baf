"""Operations on rows in the order of their experts."""
