"""Serves the page at the root of the HTTP port: a prompt to try, and a live view of queues and blocks."""
