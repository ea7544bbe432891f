"""The decisions of serving on a virtual clock: nothing is decided here.

`simulation` lets requests come, answers the instructions of a server as GPUs would, and counts what became of each
request. `goodput` searches for the highest rate that a server can bear. A server is the `Scheduler`, or a baseline.
"""
