"""What a frontend and a worker must agree on about a model: where it lies, and how its grammars are compiled."""
