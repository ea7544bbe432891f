"""A search in a Slurm job: the job's script, Ray on its nodes for it alone, and the requeue at its time limit.

`submission` (pure) makes the job script from the words of the command. `allocation` (pure) reads what Slurm has
allocated, and says by which options Ray starts on a node. `course` (pure) is the job's state machine. `job` carries it
out where the script runs, and `node_host` has the processes of Ray on one node. Start reading in docs/how-to/slurm.md.

Does not decide which trial runs where: to the search the nodes are a Ray cluster.
"""
