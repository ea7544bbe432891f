"""Serving what a search found: the best trials of a finished run answer requests over HTTP.

Decided here: which trials are served (`winners`), and how a request is read and answered (`front`). Which requests form
a batch, and when, is decided in `symphony_serve`. docs/serving.md says which process does what.

Start reading with `service`: it looks for the trials and starts the front. `running_services` finds one by its name and
asks it. `front_actor` is the front's process, `door`
its port, `front` a request's way from its head to its answer, with the scheduler in it. `service_devices` has the
devices, and starts and ends processes until each device has the models that it is to have: those of `rollouts`, which
has the versions, or of `placed_devices`, which has the placement of several models. `process` is the front's side of a
process with a model, `model_process` that process, `loaded_model` what a model in it gets and answers.
"""
