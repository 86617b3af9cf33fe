"""The weights of a model: safetensors, GGUF, pickles, or random numbers."""
