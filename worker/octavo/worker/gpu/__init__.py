"""Running steps on a GPU without waiting for it."""
