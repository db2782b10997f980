"""Runs: from a config file to a trained model, its checkpoints, metrics and report."""

__version__ = "0.1.0"
