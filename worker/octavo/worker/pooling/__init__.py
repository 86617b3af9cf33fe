"""Outputs of whole texts in place of tokens: vectors for embeddings, scores of classes."""
