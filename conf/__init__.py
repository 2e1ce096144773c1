"""Hydra groups and recipes, and the one entry helper that every verb uses."""
