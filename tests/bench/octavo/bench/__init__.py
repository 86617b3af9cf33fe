"""Speed, measured: the bundled model through all processes, and the worker alone. Never part of the tests."""
