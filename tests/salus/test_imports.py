"""The pure modules work where neither ray nor torch can be imported."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import ROOT

SCRIPT = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "torch", "pynvml", "psutil", "numpy", "fluidtune", "themis_bridge"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import salus_share
from benchmarks.shared_device.twin import TwinJob, simulate

table = salus_share.LaneTable(100)
assert table.admit("a", 10, 20) == 0
need = salus_share.Need(10, 20)
assert salus_share.packing_limit(need, 100) == 3
for name in ("FIFO", "PACK", "SRTF", "FAIR", "HPT"):
    assert simulate([TwinJob("a", 0.0, need, 3, 1.0)], 100, salus_share.policy(name))["a"].ended == 3.0
from salus_share import client, gate, service
assert not {"ray", "torch", "pynvml"} & set(sys.modules)
print("pure")
"""


def test_imports_and_works_without_ray_and_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "pure\n", done.stderr
