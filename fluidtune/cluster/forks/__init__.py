"""New processes at the price of used ones: forked from a process that has imported what they will import.

| module | what it does |
| --- | --- |
| `nodes` | which node of a job has a server that is ready |
| `quick_nodes` | which nodes start a process without the import of Ray |
| `fork_server` | starts a server, has it import, and hears from it |
| `server` | the program that imports, listens and forks |
| `preload` | the list of packages that it imports |
| `fork_launcher` | the program that Ray starts in place of Python |
| `launched` | what such a program asks for |
| `child` | what a forked process makes of itself |
| `plain_process` | the error of a process that must not be a fork |
| `forked` | the same for any Ray program |

Start with `server`. docs/workers.md says what a forked process inherits.
"""
