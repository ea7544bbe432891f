"""Serving what a search found: the best trials of a finished run answer requests over HTTP.

Decided here: which trials are served (`winners`), and how a request is read and answered (`front`). Which requests form
a batch, and when, is decided in `symphony_serve`. docs/serving.md says which process does what.

Start reading with `service`: it looks for the trials and starts the front. `front_actor` is the front's process, `door`
its port, `front` a request's way from its head to its answer, with the scheduler in it. `remote_devices` is the front's
side of the processes that hold the models, `model_process` such a process, `loaded_model` what a model in it gets and
answers. `model_leases` are the devices that a service leases from the arbiter, `placed_devices` those of a service of
several models (`placed_models`).
"""
