"""Salus: several trials on one GPU, switched at iteration boundaries.

A lane manager packs trials by persistent and ephemeral memory and runs one iteration per lane at a time. Which
trials share a GPU is not decided here (fluidtune does). Imports neither ray nor fluidtune. Empty so far: the
pure lane table and policies come next.
"""
