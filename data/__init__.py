"""Conversations to tokens, loss masks and a cache of target hidden states."""
