"""Any decoder-only architecture of transformers, its attention paged and its layers shared among ranks."""
