"""The conversation with schedulers: journals of requests, one session for each scheduler, and the choice among
several."""
