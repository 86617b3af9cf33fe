"""The decisions: the scheduler's state, and the events that change it. Nothing here knows a socket or a clock."""
