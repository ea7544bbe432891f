"""Serving on the real clock: threads that carry the scheduler's instructions out. Nothing is decided here.

`threaded_server` answers requests in one process: the scheduler behind a lock, a thread that keeps the time, and one
thread for each device. `measuring` finds the profiles and delays that the decisions need. Neither needs Ray or torch; a
model is a function.
"""
