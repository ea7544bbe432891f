"""Calls of modules, divided between a trial's leader and its followers: see docs/divided.md."""
