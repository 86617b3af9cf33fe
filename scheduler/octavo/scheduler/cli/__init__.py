"""The commands that run a scheduler and that operate one."""
