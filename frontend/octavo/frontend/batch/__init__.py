"""Files, and batches of calls that are answered in the background: /v1/files and /v1/batches."""
