"""Runs the production scheduler in virtual time, with replicas that compute nothing but take as long as real ones."""
