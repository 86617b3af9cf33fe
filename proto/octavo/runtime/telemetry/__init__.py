"""Reports to operators what every process does: logs, metrics, traces."""
