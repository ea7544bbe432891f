"""Benchmarks: each module is one command, ``python -m benchmarks.NAME``, and prints one JSON object.

Measures FluidTune against stock Ray Tune, the twin against real runs, and single parts against their alternatives.
README.md lists the commands and the keys. Start with `common` (what all share) and `sides` (what is compared).
Nothing is asserted here: tests do that, and tests measure no time.
"""
