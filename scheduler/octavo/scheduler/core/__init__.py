"""What decides: the scheduler's state and the events that change it. It knows no socket, no clock and no thread."""
