"""Speed and memory, measured: the bundled model through all processes; the worker alone; the scheduler alone. Speed is
never part of the tests."""
