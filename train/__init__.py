"""Objectives, the training loop and the processes that run it."""
