"""The command `octavo`: finds the service that brings a subcommand, and supervises all of them in `octavo serve`."""
