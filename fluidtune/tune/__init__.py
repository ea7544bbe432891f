"""The edge to Ray Tune: carries messages between Tune's controller, trials, the engine and workers. It decides nothing.

How a trial passes from Tune to a worker and back, with the files in order (start reading at `manager`):

1. `scheduler` gets the trial and puts `manager` under Tune's controller; `tuning_job` is made for the first one.
2. Tune asks `manager` for the trial's actor. `trial_registry` makes events for the engine; `tuning_job` hands them on.
3. The engine answers `Start` with devices. `trial_shell` hands that to the trial's life (`fluidtune.trials`), which
   decides all that follows, and asks `worker_dispatch` for a worker of the first device. That one takes one from
   `fluidtune.cluster.pool`, and `trial_shell` has it (`fluidtune.cluster.hosting.worker`) load the trial.
4. Tune's calls go through `manager` and `trial_shell` to that worker, one at a time. Each answer comes back by
   `ray_calls`, becomes an event in `worker_answers` and goes to the trial's life. What follows from it goes to the
   engine as an event, to `job_log`, and to Tune by `tune_callbacks`. docs/architecture.md has a result's way whole.
5. Further workers come, and workers leave, as the trial's life says; `worker_dispatch` returns a worker to the pool, or
   replaces it.

`trial_run` is what the driver keeps of a trial, and what the trial's life reads of Tune and of the job. `worker_specs`
is what a worker is told of it. `device_setup` cuts and holds the job's devices. `api`, `executor` and `launcher`, with
`run_options` and `stand_ins`, are what a user calls. `groups` translates each algorithm into TrialGroups. `snapshots`,
`experiment_folder`, `result_logs`, `final_report`, `stall_detector`, `gpu_telemetry`: see their names.
"""
