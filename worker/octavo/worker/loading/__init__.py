"""Where weights come from: safetensors, GGUF, pickles, or random numbers."""
