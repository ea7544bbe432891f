"""States to which a trial can return: when they are written, how they are kept, and the proof that they are whole.

Start with `commit_policy`: what is committed when, and what a trial goes on from. `commit_store` writes commits and
reads them back. `proof` compares an epoch that is run again with what the trial made of it. `carried` names the
variables that a loop carries from one epoch to the next.
"""
