"""Real processes that die, hang and leave under load: `python -m octavo.testing.chaos kill-workers --count 500`."""
