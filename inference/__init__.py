"""Lossless speculative decoding: drafting, verification, rollback."""
