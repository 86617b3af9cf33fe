"""Holds what all HTTP APIs share: bodies and their sampling fields, handlers, and a call's generations."""
