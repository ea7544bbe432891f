"""Serving on the real clock: an event loop that carries the scheduler's instructions out. Nothing is decided here.

`async_server` answers requests on one loop: the scheduler, a timer, and one task for each device (`device`).
`measuring` finds the profiles and delays that the decisions need. Nothing here needs Ray or torch; a model is a
function.
"""
