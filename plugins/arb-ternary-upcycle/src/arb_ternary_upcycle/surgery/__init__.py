"""Turns standard attention into decoupled attention."""
