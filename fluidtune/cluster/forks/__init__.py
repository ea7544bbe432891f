"""New processes at the price of used ones: forked from a process that has imported what they will import.

| module | what it does |
| --- | --- |
| `nodes` | which node of a job has a server that is ready |
| `fork_server` | starts a server, has it import, and hears from it |
| `server` | the program that imports, listens and forks |
| `preload` | what is imported, and what each import has depended on |
| `forkable` | whether a process that has imported a package can be forked |
| `made_at_import` | what a package has made at its import and each process has alone |
| `shelf` | keeps modules out of sight until they are imported, and repeats imports that would give something else |
| `child` | what a forked process makes of itself |
| `fork_launcher` | the program that Ray starts in place of Python |
| `forked` | the same for any Ray program |

Start with `server`. docs/workers.md says what a forked process inherits.
"""
