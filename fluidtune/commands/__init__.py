"""What `fluidtune doctor`, `docs` and `plan` find and print, each in its module. `fluidtune.cli` calls them."""
