"""The only sockets, clock and threads of a scheduler: its loop, the Admin service, the event log, metrics."""
