"""The target adapter, the draft models and the two protocols between them and the rest."""
