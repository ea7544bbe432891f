"""The program that Ray runs as a worker, and what it has read before any code of a user's runs."""

from __future__ import annotations

#: The program's module.
MODULE = "ray._private.workers.default_worker"
#: Variables that ``ray.init`` or the raylet sets, and that are read when they are needed: what was imported with other
#: values is right. All others that begin with RAY_ may have been read by Ray's compiled part when it was loaded.
READ_LATER = {"RAY_USAGE_STATS_ENABLED", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_CLIENT_MODE"}
