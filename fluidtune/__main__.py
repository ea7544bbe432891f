"""``python -m fluidtune`` is ``fluidtune``."""

from fluidtune.cli import main

main()
