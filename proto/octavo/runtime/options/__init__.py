"""Makes the options of a command of its configuration's fields, which hold flag, variable, default and help."""
