"""Helpers of the tests of several distributions."""
