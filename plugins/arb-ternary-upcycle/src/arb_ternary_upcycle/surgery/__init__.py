"""Decoupled attention out of standard attention."""
