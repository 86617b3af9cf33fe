"""The paper's evaluation, redrawn with the production scheduler: baselines, figures, and the page that compares."""
