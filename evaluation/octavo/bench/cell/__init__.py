"""Measures the scheduler as the hub of a cell: how many replicas one scheduler process keeps busy on one core."""
