"""Steering: a user stops, keeps or clones a trial while the search runs (docs/how-to/steer.md).

Decides what becomes of each such act (acts.py, pure; start there). steering_files.py carries acts from a command or a
page to the driver of the run, as files in the run's folder. json_values.py reads what a user types. What an act does to
a trial of Tune is in fluidtune/tune/steered_run.py.
"""
