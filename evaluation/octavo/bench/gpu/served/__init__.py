"""Models served on a GPU, by Octavo and by others."""
