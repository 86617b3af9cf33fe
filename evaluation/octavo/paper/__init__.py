"""Redraws the paper's evaluation with the production scheduler: baselines, figures, and the page that compares."""
