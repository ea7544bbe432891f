"""What needs a real GPU: ``python -m benchmarks.gpu`` goes through all of it, ``salus`` and ``search`` are its parts.

docs/gpu.md says which of it one GPU has run. ``--rehearse`` goes through them on cores, and measures nothing.
"""
