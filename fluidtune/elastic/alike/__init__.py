"""Whether the workers of a trial are alike, and so whether the trial may have several.

Start with `likeness`: what all workers call at the same places. `common_batches` is a machine: which batches all
compute whole, so that each joiner is compared with the leader. `digests` makes weights and state comparable. `growth`
keeps why the trial has to have one worker. Nothing here knows a loader or a loop. (Whether a trial's code can be
divided at all is tried before it grows, in `checks`.)
"""
