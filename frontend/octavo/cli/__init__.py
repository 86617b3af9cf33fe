"""Runs the command `octavo`: finds the service with a subcommand, and supervises all services in `octavo serve`."""
