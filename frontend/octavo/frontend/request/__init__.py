"""Declares requests and their events as values, without a clock or a socket, and checks requests."""
