"""Blocks that replicas take over from each other: of groups that move, and of prefixes that several begin with."""
