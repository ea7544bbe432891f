"""What runs on the cluster for one job: its devices, the pool of workers, and the worker process.

| part | what it does |
| --- | --- |
| `devices` | what a device is, and what holds a job's devices |
| `pool` | which process serves which trial next |
| `new_processes` | how a process is started |
| `hosting` | the worker process: hosts a trial's leader or one of its followers |
| `sharing` | how the trials of one device share it |
| `forks` | the processes of workers, forked from one that has imported what they import |
| `data` | data sets that the processes of a job have in memory once a node |
| `emulated` | devices that compute nothing |

Start with `hosting.worker`. Which trial runs where, and how wide, is decided in `fluidtune.engine`; nothing here
decides it. `pyproject.toml` says which part may import which.
"""
