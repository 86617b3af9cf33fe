"""Measures what one GPU gives, and how near to it Octavo comes, beside peers that are at hand: `python -m
octavo.bench.gpu`."""
