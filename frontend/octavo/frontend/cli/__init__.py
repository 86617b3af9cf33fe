"""The commands `octavo frontend`, `generate`, `chat` and `health`."""
