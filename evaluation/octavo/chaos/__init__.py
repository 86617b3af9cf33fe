"""Real processes that die, hang and leave under load: `python -m octavo.chaos kill-workers --count 500`."""
