"""What runs on the cluster for one job: its devices, the pool of workers, and the worker process.

| module | what it does |
| --- | --- |
| `device_source` | the protocol of what holds a job's devices |
| `devices` | works out a job's devices from what a trial asks for; holds devices of the job's own |
| `pool` | which process serves which trial next |
| `new_processes` | how a process is started |
| `worker` | the worker process: hosts a trial's leader or one of its followers |
| `forks` | the processes of workers, forked from one that has imported what they import |
| `data` | data sets that the processes of a job have in memory once a node |
| `few_collections` | what a new worker process imports costs fewer garbage collections |
| `process_reset` | whether a process is clean enough for another trial |
| `process_settings` | what of a process is put back, and what is only looked at |
| `trial_modules`, `patches` | the modules that a trial has imported; what it has replaced in others |
| `noted_calls`, `process_leftovers` | what a trial wants done at the end of its process; what it leaves there |
| `result_replay`, `commit_stores` | what commits keep of a trial's results, and where commits are |
| `lanes`, `mps` | how the trials of one device share it |
| `emulated` | devices that compute nothing |

Start with `worker`. Which trial runs where, and how wide, is decided in `fluidtune.engine`; nothing here decides it.
"""
