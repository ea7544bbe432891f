"""What needs a real GPU: ``python -m benchmarks.gpu`` goes through all of it, ``salus`` and ``search`` are its parts.

None has been run on a GPU: none was available. ``--rehearse`` goes through them on cores, and measures nothing.
"""
