"""A model without arithmetic, for tests of everything around it."""
