"""The disk tier of KV blocks: a store of segment files, which the worker's threads fill and read by block names."""
