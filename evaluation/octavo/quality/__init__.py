"""Measures how well a model predicts a text, and how far its predictions are from those of its original."""
