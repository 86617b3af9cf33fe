"""The execution of steps on a GPU, which the host does not wait for."""
