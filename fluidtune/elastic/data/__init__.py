"""What a trial consists of: the state of the user's objects, as one value that a commit holds.

Start with `trial_state`. `snapshot` copies it, `plain_state` gives a state to what has none, `loaders` is about the
order of the data, `gradients` about those that no step has taken.
"""
