"""The `fluidtune` command: `fluidtune run` goes straight to the script, everything else to click (`cli`).

Until a script's first line nothing is imported that it may import itself. Where the words after `run` are not plain,
click shows the help, or says what is wrong.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script. A FluidTuneError is printed as one line, with exit status 2."""
    from fluidtune.errors import FluidTuneError
    from fluidtune.tune.launcher import run_script
    from fluidtune.tune.run_options import read

    asked = read(sys.argv[2:]) if sys.argv[1:2] == ["run"] else None
    if asked is None:
        from fluidtune.cli import main as by_click

        return by_click()
    try:
        run_script(*asked)
    except FluidTuneError as error:
        print(f"fluidtune: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
