"""Load on a frontend's doors, and a scheduler behind it that keeps time: each in a process of its own."""
