"""Scripts of other people's frameworks as trials: ``python -m benchmarks.frameworks``.

`scripts` has stock Ray Tune scripts, as the guides of each framework have them. `catalogue` names them and what they
import, `runs` runs one of them on one side and compares the sides.
"""
