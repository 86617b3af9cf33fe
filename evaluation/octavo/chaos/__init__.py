"""Runs campaigns in which real processes die, hang and leave under load: `python -m octavo.chaos kill-workers --count
500`."""
