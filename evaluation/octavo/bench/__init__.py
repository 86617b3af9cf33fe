"""Measures speed and memory: of the bundled model through all processes, of the worker alone, of the scheduler alone.
Tests assert no speed."""
