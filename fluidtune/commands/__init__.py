"""What commands read, find and print, each in its module. `fluidtune.cli` has the command itself."""
