"""Benchmarks that need a real GPU. ``salus`` is the only one so far; its docstring lists its parts.

None has been run on a GPU: none was available. ``--rehearse`` goes through a benchmark on a core, and measures nothing.
"""
