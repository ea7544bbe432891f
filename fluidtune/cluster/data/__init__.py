"""Data that the processes of a job have in memory once a node: `fluidtune.shared`.

| module | what it does |
| --- | --- |
| `shared_data` | what a trial calls: loads the data and writes them into the node's memory, or maps them |
| `load_identity` | tells by which functions the same data are loaded |
| `node_files` | the node's memory, and whose turn it is to load: two files that the driver or an actor holds open |
| `trial_parameters` | what a trial has by `tune.with_parameters` |
"""
