"""The offline API: the same processes, started and stopped with an object."""
