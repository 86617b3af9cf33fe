"""What every process tells its operators: logs, metrics, traces."""
