"""Serves the HTTP port: connections, guards, errors and streamed responses."""
