"""Tries, before a trial grows, whether its code computes the same alone and divided among two workers.

Start with `rehearsal`, which a joiner runs while the trial trains on. `in_turns` runs the two workers in one process,
`steady_draws` takes chance out of their steps, and `verdict` is what the driver gets.
"""
