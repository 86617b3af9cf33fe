"""Measures a frontend alone: load on its interfaces, and a scheduler behind it that keeps time, all as processes."""
