"""Octavo's processes in virtual time, and who starts them again."""
