"""Who runs next, and where its KV blocks are. The core is pure; `shell` and `admin` carry it to sockets."""
