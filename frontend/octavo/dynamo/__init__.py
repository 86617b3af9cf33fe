"""Joins a cell of Octavo, a frontend with its scheduler and workers, to a cluster of NVIDIA Dynamo."""
