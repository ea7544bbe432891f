"""Data that the processes of a job have in memory once a node: `fluidtune.shared`.

| module | what it does |
| --- | --- |
| `kept_data` | decides who loads a data set, who waits for it, who gets it |
| `data_keeper` | holds a node's data sets, in the driver or in an actor |
| `shared_data` | what a trial calls: asks the keeper, loads and writes the data, or maps them |
| `trial_parameters` | what a trial has by `tune.with_parameters` |
"""
