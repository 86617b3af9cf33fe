"""Ties the lives of processes together and remembers how processes have ended."""
