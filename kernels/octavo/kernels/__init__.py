"""Operations on paged keys and values: a plain-torch reference, which is the oracle, and what production calls."""
