"""Everything that FluidTune uses of Ray beyond Ray's public API, behind functions that say what they do.

`versions`: which Ray versions are tested. `controller`: Tune's trial loop, and the class that takes the place of its
`RayActorManager`. `schedulers`: the state of Tune's algorithms and stoppers. `trainable`: a trial's own process.
`cloning`: a further trial made from one that is there. `checkpoint_deletion`: which checkpoints stay.
`searches`: a search that goes on. `entry_points`: ``ray.tune.run`` and ``ray.tune.Tuner``.
`accelerators`: a process' devices. `worker_program`: what Ray runs as a worker. `worker_start`: by what it starts
one. `ownership`: what this process has created in Ray. `descent`: what an actor has, and that in turn. `train_runs`:
where workers of Ray Train start. `cluster_address`: the cluster that a job joins.
`job_metadata`: what a job says of itself. `kept_state`: what an actor keeps. `whole_files`: how a run's files get into
its storage. `run_state`: what that has of it. This package decides nothing and imports nothing but `errors` and
`device_kinds`. ``python -m tools.ray_boundary`` fails when code elsewhere reaches past Ray's public API; what Ray marks
as PublicAPI or DeveloperAPI counts as public.

The list: each entry names what is used, and why. tests/ray_compat fails when a Ray release changes an entry, or when
this package uses something that has no entry.

Tune's controller (`controller`):

- ``TuneController._actor_manager``: our manager takes its place on the first trial. Ray removed its pluggable executor
  in 2.7; this attribute, with the methods of `RayActorManager`, is where the executor used to be.
- ``TuneController._reuse_actors``: what the script says; then switched off, because FluidTune's pool of workers
  follows it.
- ``TuneController.cleanup``: replaced, to learn that the run is over. Tune calls it before it stops the trials that
  could go on in a later run.
- ``TuneController._used_resources_string``: extended by FluidTune's status line. Every reporter shows it; what the
  scheduler says (``debug_string``) is shown in a notebook and in Tune's old output only.
- ``TuneController._iteration``: how many turns Tune's loop has made, above 0 where the first trial is a restored one.
- ``TuneController._storage``: the experiment's name and directory, and how its files get there.
- ``StorageContext``, ``StorageContext._timestamp``: names the folder in which a run stages its files.
- ``_FilesystemSyncer``, ``_FilesystemSyncer._sync_up_command``: what brings the run's files into its storage
  (`whole_files`). It calls this as soon as Tune has written its state, and carries out what that returns in a thread.
- ``TuneController._stopper``: the run's stopper object, which may end every trial at one iteration.
- ``TuneController._set_trial_status``: makes a whole rung that HyperBand promotes pending at once.
- ``TuneController._pending_trials``: the pending trials that have run before are counted.
- ``TuneController._max_pending_trials``: how many trials Tune lets be pending; FluidTune raises the number, by the
  public method ``update_max_pending_trials``, while processes start and while promoted trials are pending.
- ``TuneController._process_trial_save``, ``TuneController._cached_trial_decisions``: a checkpoint that Tune has not
  asked for is registered by Tune's own step. What Tune will do after a ``save`` stays; a snapshot waits for a pause.
- ``Trial._default_result_or_future``: what a trial's process has said of itself, which a trial that has reported does
  not need.
- ``serialization.log_once``: replaced, because by it the encoder of Tune's states remembers the result of each
  checkpoint.
- ``TrialRunnerWrapper._tune_controller``: some callbacks hand a scheduler this wrapper instead of the controller.
- ``TrackedActor``: the object by which the controller knows a trial's actor.
- ``TrackedActor._on_start``, ``TrackedActor._on_stop``, ``TrackedActor._on_error``: the controller's callbacks. Tune
  may take one back until it is called, so they are read from it.
- ``RayActorManager._live_actors_to_ray_actors_resources``: the controller reads the handle of a trial's actor there.
  The handles of trials that are left to Ray's own manager are seen in ours.
- ``RayActorManager._actor_task_events``: the controller waits for one future with its ``resolve_future``. That of a
  trial that is left to Ray is found by ``get_futures``.

The cluster that a job joins (`cluster_address`):

- ``canonicalize_bootstrap_address``, ``read_ray_address``: by them ``ray.init()`` finds the cluster that it joins.
- ``get_ray_address_file``: the file that a user deletes if that has ended.
- ``GcsClient``: asks a head node for its nodes' folders, and so whether it takes this user's token.
- ``ensure_token_if_auth_enabled``: says which token is missing. Ray's client ends the process then.
- ``maybe_enable_token_auth_if_token_available``: since Ray 2.60, how ``ray.init()`` comes to send a user's token to a
  cluster that it has found itself. Older ones have no tokens.

A checkpoint from which another trial goes on (`checkpoint_deletion`):

- ``checkpoint_manager._delete_fs_path``: by it Tune deletes the checkpoints that are more than ``num_to_keep``.

A trial that is made from another one (`cloning`):

- ``TuneController._search_alg``: what stands before it tells the run's search algorithm nothing of clones. Tune has
  trials added by hand (``add_trial``, public), and expects that a search algorithm tells them from its own.
- ``TuneController._mark_trial_to_checkpoint``: Tune saves what is new of a trial only where it is marked.
- ``TuneController._trials``, ``TuneController._live_trials``: a clone that could not be added is taken out of them.
- ``Trial._restore_checkpoint_result``: the checkpoint that a trial begins with, of which ``restore_path`` has the path
  alone, without the iteration that it belongs to.

A search that goes on (`searches`). Tune has no way to raise ``num_samples`` of a run:

- ``BasicVariantGenerator._iterators``, ``BasicVariantGenerator._points_to_evaluate``,
  ``BasicVariantGenerator._trial_iter``, ``BasicVariantGenerator._finished``, ``BasicVariantGenerator._total_samples``:
  what it was to make, and that it has. ``add_configurations``, which is public, makes more.
- ``SearchGenerator._experiment``, ``SearchGenerator._counter``, ``SearchGenerator._total_samples``,
  ``SearchGenerator._finished``: the same around a searcher.
- ``inject_placeholders``, ``create_resolvers_map``: what Tune makes of a search space for its search algorithm.

Tune's algorithms and stoppers (`schedulers`):

- ``AsyncHyperBandScheduler._mode``, ``HyperBandScheduler._mode``, ``MedianStoppingRule._mode``,
  ``PopulationBasedTraining._mode``: the script's "min" or "max". Algorithms without it are asked for it, too.
- ``AsyncHyperBandScheduler._time_attr``, ``HyperBandScheduler._time_attr``, ``MedianStoppingRule._time_attr``,
  ``PopulationBasedTraining._time_attr``: the attribute of a result in which the algorithm counts.
- ``AsyncHyperBandScheduler._max_t``: how long a trial may train.
- ``AsyncHyperBandScheduler._stop_last_trials``, ``AsyncHyperBandScheduler._brackets``,
  ``AsyncHyperBandScheduler._trial_info``, ``_Bracket._rungs``: whether that ends it; the brackets, which of them
  each trial is in, and their rungs, to which higher ones are added (of the ``_Bracket`` of ASHA's module).
- ``HyperBandScheduler._hyperbands``: the brackets.
- ``HyperBandScheduler._process_bracket``: halves a bracket that HyperBand itself does not look at any more.
- ``_Bracket._live_trials``, ``_Bracket._halves``, ``_Bracket._cumul_r``, ``_Bracket._n``, ``_Bracket._eta``,
  ``_Bracket._max_t_attr``: which rung a trial is in, where that rung ends, and what follows it.
- ``_Bracket.current_trials``, ``_Bracket.trials_to_unpause``, ``_Bracket.finished``: which trials of a bracket are
  promoted. The class is private, so that these are, too.
- ``PopulationBasedTraining._synch``, ``PopulationBasedTraining._next_perturbation_sync``,
  ``PopulationBasedTraining._perturbation_interval``: the perturbation intervals.
- ``PopulationBasedTraining._trial_state``: the population, and when each trial was last perturbed.
- ``PopulationBasedTraining._num_perturbations``: tells whether a trial has got another one's state.
- ``_FutureTrainingResult``: a checkpoint that is being saved, which no pickled scheduler can hold.
- ``flatten_dict``: a trial's last result as Tune hands it to a scheduler.
- ``MaximumIterationStopper._max_iter``, ``CombinedStopper._stoppers``: the iteration at which a stopper ends a trial.

A trial's process (`trainable`):

- ``Trainable._iteration``, ``Trainable._time_total``: set when a trial resumes from a commit.
- ``Trainable._timesteps_total``, ``Trainable._episodes_total``: set when a trial resumes from a commit.
- ``FunctionTrainable._last_training_result``: tells whether the function has reported since it was started.
- ``_TrainingResult``: what ``save`` returns to Tune.
- ``_TrainSession.training_thread``, ``_TrainSession.continue_lock``, ``_TrainSession.result_queue``,
  ``_TrainSession.error_queue``: the loop of a trial that ends is allowed to go on from its report to its boundary.
- ``registry._ParameterRegistry``, ``_ParameterRegistry.get``, ``_ParameterRegistry.references``: a trial gets there
  what ``tune.with_parameters`` has put into Ray's object store. Each process would copy the tensors in it.
- ``Thread._target``: of the function's thread, which has not begun; the function's end is noticed in that thread.
- ``get_session``: returns the process' session.
- ``class_cache.ENV_VARS_TO_PROPAGATE``: the environment variables of the driver that Tune gives to trial processes.
- ``result.TRIAL_INFO``, ``result.RESULT_DUPLICATE``, ``result.TRAINING_ITERATION``, ``result.TIME_TOTAL_S``,
  ``result.TIMESTEPS_TOTAL``, ``result.EPISODES_TOTAL``, ``result.SHOULD_CHECKPOINT``: keys of configurations and
  results.
- ``FunctionTrainable.save_checkpoint``: returns what the function reported last, so that ``save`` needs no call of its
  own. Only Population Based Training waits for the future that Tune makes of such a call (`schedulers`).
- ``trainable.disable_ipython``: replaced in a worker, because it imports IPython, a package that may keep something.
- ``result.EXPR_RESULT_FILE``, ``result.EXPR_PROGRESS_FILE``: names of log files.
- ``result.AUTO_RESULT_KEYS``: what Tune fills into a result, which no proof of a commit compares.

The resources of a process (`accelerators`; ``RuntimeContext.get_assigned_resources``, which is public, is replaced as
well, because a process that holds nothing of its device runs a trial that asks for something):

- ``Worker.get_accelerator_ids_for_accelerator_resource``: replaced in the one process of a trial over several GPUs,
  whose placement group has one of them.
- ``worker.global_worker``: the process' ``Worker``.

What a process owns (`ownership`):

- ``ActorClass._remote``, ``RemoteFunction._remote``: the functions by which all actors are created and all tasks are
  submitted, whatever options they have. A process that a trial has used them in ends with the trial. (A placement
  group is noticed by its public class.)

What an actor has created (`descent`). Ray's public list needs the dashboard, and names no creators:

- ``GlobalStateAccessor``, ``ray._private.state``, ``GlobalState.gcs_options``: the tables of actors and of
  placement groups, and the address to ask.
- ``ActorTableData.FromString``, ``ActorTableData.DEAD``, ``PlacementGroupTableData.FromString``,
  ``PlacementGroupTableData.REMOVED``, ``PlacementGroupTableData.PENDING``: their rows.
- ``ActorHandle._actor_id``: the id of a worker that has died.
- ``CoreWorker.kill_actor``, ``CoreWorker.deserialize_and_register_actor_handle``, ``core_worker_pb2.ActorHandle``: an
  actor is killed whose handle only the process has that has created it.

A run of Ray Train V2 inside a trial (`train_runs`, `ownership`):

- ``WorkerGroupCallback.on_worker_group_start``: entered in the process of the run's controller, before that makes a
  placement group. The controller is an actor of the class ``TrainController``, whose arguments have ``scaling_policy``
  and ``callbacks``.
- ``TrainController.__init__``: wrapped before Ray 2.50, where Tune has a trial's process be the controller itself
  (RUN_CONTROLLER_AS_ACTOR_ENV_VAR in its function_trainable).
- ``worker_group.placement_group``, ``worker_group.PlacementGroupSchedulingStrategy``: what the controller calls to make
  the group, and to place a worker in it.
- ``ScalingConfig._resources_per_worker_not_none``: what each worker asks for, with Ray Train's defaults.

The trials of a run (`run_state`):

- ``get_fs_and_path``, ``_find_newest_experiment_checkpoint``: which file is its newest state.
- ``ExperimentAnalysis._fetch_trial_dataframes``: replaced, because the constructor reads all results of all trials by
  it, into tables that only other methods use.

The cluster (`cluster_state`):

- ``get_cluster_resource_state``: what each node has free, and what waits for resources, as Ray tells its autoscaler.
- ``Worker.gcs_client``: the connection to ask it by, also for the status that Ray's monitor keeps for ``ray status``,
  and for what an actor keeps beyond its process (`kept_state`).
- ``GlobalState.get_draining_nodes``: the nodes that Ray drains, as for a spot instance that is about to be taken away.
- ``Worker.mode``: whether Ray runs everything in this process (in old Rays only).

The job (`job_metadata`):

- ``Worker.core_worker``, ``CoreWorker.get_job_config``: the metadata with which a job was submitted.

Tune's entry points (`entry_points`):

- ``Tuner._local_tuner``, ``TunerInternal._tune_config``, ``TunerInternal._run_config``: where a Tuner keeps these.
- ``ray.tune.tune``, ``ray.tune.tuner``: modules from which a script may import ``run`` and ``Tuner``; ``fluidtune run
  SCRIPT`` replaces both names there, too.

A worker's process (`worker_program`):

- ``ray._private.workers.default_worker``: the program that Ray runs as a worker. A fork server imports what it imports.

What starts a worker (`worker_start`):

- ``RayParams.__init__``, ``RayParams.setup_worker_path``: the program that Ray starts a worker by. The raylet asks that
  the word has "setup_worker.py" in it, and leaves it out where a worker has no runtime environment.
"""
