"""Steering: a user stops, keeps or clones a trial while the search runs (docs/how-to/steer.md).

Decides what becomes of each such act (acts.py, pure; start there). steering_link.py carries acts from a command or a
page to the driver of the run, on its machine and for its user alone. asking.py is the user's end of it, with errors in
words. What an act does to a trial of Tune is in fluidtune/tune/steered_run.py.
"""
