"""Options of commands as fields of configurations: one place for a flag, its variable, its default and its help."""
