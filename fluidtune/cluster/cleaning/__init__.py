"""Whether a used process is clean enough for another trial: `process_reset` decides.

`process_settings` is what of a process is put back and what is only looked at, `trial_modules` the modules that a trial
has imported, `patches` what it has replaced in others, `noted_calls` what it wants done at the end of its process, and
`process_leftovers` what it leaves there. `open_runs` ends the runs of trackers that it has left open.
"""
