"""The model families that run natively, and how a model directory chooses one."""
