"""The Python client of octavo.v1."""
