"""Placement on recorded profiles: the published tables of AlpaServe, and rivals. Start it with `__main__`."""
