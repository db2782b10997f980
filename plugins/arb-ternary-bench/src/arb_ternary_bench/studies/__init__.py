"""Studies: one module each, with its grid, its table and its figures.

A module defines ``STUDY``, a :class:`arb_ternary_bench.study.Study`. ``python -m
arb_ternary_bench.study NAME`` runs it.
"""
