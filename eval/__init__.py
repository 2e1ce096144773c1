"""Prompts, metrics and reports: what a draft model is worth."""
