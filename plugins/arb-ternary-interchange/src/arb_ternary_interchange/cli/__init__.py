"""Commands: ``arb export``, ``arb import``, ``arb inspect``."""
