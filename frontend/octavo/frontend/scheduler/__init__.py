"""Talks with schedulers: journals of requests, a session with each scheduler, and the choice among several."""
