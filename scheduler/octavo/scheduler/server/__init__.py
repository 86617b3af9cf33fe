"""The shell around the core: the only sockets, clock and threads of a scheduler, the Admin service, event log and
metrics."""
