"""The edge to Ray Tune: carries messages between Tune's controller, the engine and the workers. It schedules nothing.

How a trial passes from Tune to a worker and back, with the files in order (start reading at `manager`):

1. `scheduler` is told of the trial and puts `manager` under Tune's controller; `tuning_job` is made for the first one.
2. Tune asks `manager` for the trial's actor. `trial_registry` says what the engine is told; `tuning_job` tells it.
3. The engine answers `Start` with devices. `trial_leaders` asks `worker_dispatch` for a worker of the first device,
   which takes one from `fluidtune.cluster.pool`, and has it (`fluidtune.cluster.worker`) load the trial.
4. Tune's tasks go through `manager` and `trial_leaders` to that worker, one at a time. Each answer comes back by
   `ray_calls` to `trial_leaders`: to the engine as an event, to `job_log`, and to Tune by `tune_callbacks`.
5. `resizer` adds and dismisses further workers. `trial_recovery` takes a trial off its workers, when one died or when
   Tune let go of the trial; `worker_dispatch` then returns the worker to the pool, or replaces it.

A trial's state here is a `trial_run`; `run_table` finds it. `device_setup` cuts and holds the job's devices, of which
`leased_devices` are lent by the arbiter. `api`, `launcher` and `executor` are what a user calls. `groups` translates
each algorithm into TrialGroups. `commit_cleanup`, `experiment_folder`, `result_logs`, `final_report`, `stall_detector`,
`gpu_telemetry`: see their names.
"""
