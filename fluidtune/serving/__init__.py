"""Serving what a search found: the best trials of a finished run answer requests over HTTP.

Decided here: which trials are served (`winners`), and how a request is read and answered (`front`). Which requests form
a batch, and when, is decided in `symphony_serve`. Ray Serve is the front door. docs/serving.md says which process does
what.

Start reading with `service`: it looks for the trials and starts the front. `front` is the one replica of Ray Serve with
the scheduler in it, `remote_devices` its side of the processes that hold the models, `model_process` such a process.
`model_leases` are the devices that a service leases from the arbiter.
"""
