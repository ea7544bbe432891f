"""A device that jobs share in lanes, on a virtual clock: `twin` runs whole traces by the decisions of `salus_share`."""
