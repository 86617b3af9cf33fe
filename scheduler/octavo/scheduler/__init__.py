"""The scheduler: decides which requests run next, and where their KV blocks are. The core is pure; `server` joins it to
sockets and the clock, `cli` to the command line."""
