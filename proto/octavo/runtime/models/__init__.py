"""Holds the facts about a model on which a frontend and a worker must agree, and the time that its steps take."""
