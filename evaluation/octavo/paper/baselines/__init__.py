"""Provides memory and batching of the systems that the paper compares for the production scheduler; no serving code."""
