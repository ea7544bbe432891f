"""What runs on the cluster for one job: its devices, the pool of warm workers, and the worker process.

| module | what it does |
| --- | --- |
| `device_source` | the protocol of what holds a job's devices |
| `devices` | works out a job's devices from what a trial asks for; holds devices of the job's own |
| `pool` | which process serves which trial next |
| `worker` | the worker process: hosts a trial's leader or one of its followers |
| `few_collections` | what a new worker process imports costs fewer garbage collections |
| `kept_trainable` | a class trainable that stays between two trials, with `reuse_actors=True` |
| `process_reset` | whether a process is clean enough for another trial |
| `process_settings`, `library_settings`, `logging_state` | what a trial can change, and how it is put back |
| `library_imports`, `patches` | what a library does while it is imported; what a trial has replaced in modules |
| `exit_handlers`, `process_leftovers` | what a trial wants done at the end of its process; what it leaves there |
| `result_replay`, `commit_stores` | what commits keep of a trial's results, and where commits are |
| `lanes`, `mps` | how the trials of one device share it |
| `emulated` | devices that compute nothing |

Start with `worker`. Which trial runs where, and how wide, is decided in `fluidtune.engine`; nothing here decides it.
"""
