"""What a trial consists of: the state of the user's objects, as one value that a commit holds.

Start with `trial_state`. `leaves` and `plain_state` are about what is no tensor, `loaders` about the order of the data,
`gradients` about those that no step has taken.
"""
