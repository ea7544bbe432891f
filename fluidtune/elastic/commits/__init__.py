"""States to which a trial can return: what they hold, when they are written, and which two are kept.

Start with `commit_policy`: what is committed when, and what a trial goes on from. `commit_store` writes commits and
reads them back. `committable` is what a trial's state must do for that, and how far a trial is.
"""
