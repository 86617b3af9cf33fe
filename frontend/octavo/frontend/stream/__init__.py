"""Carries one request from its preparation to its last event, whatever interface it came through."""
