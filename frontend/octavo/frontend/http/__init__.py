"""The HTTP port: its connections, its guards, its errors and its event streams."""
