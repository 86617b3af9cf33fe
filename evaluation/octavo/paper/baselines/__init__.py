"""The systems that the paper compares with, as memory and batching for the production scheduler; no serving code."""
