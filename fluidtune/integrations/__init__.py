"""Trials of other people's training frameworks over `fluidtune.elastic`; each module needs its framework installed.

`lightning`, `transformers` (Hugging Face's Trainer) and `accelerate` each say in their first page how. A framework sees
one process with one device; the elastic session divides the work beneath it. `keras` reports and saves only.

Only the public names of `fluidtune.elastic` are used here, and of the framework what it documents for others to derive
from or to call.
"""
