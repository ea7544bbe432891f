"""The protocols of FluidTune's exchangeable parts, as tests that an implementation inherits. Needs pytest.

| module | what it proves |
| --- | --- |
| `device_source` | a `fluidtune.cluster.device_source.DeviceSource` |

The test file of a new implementation is a fixture and an import; each module shows it in its first lines.
"""

from __future__ import annotations

import pytest

# pytest explains a failed assertion only in modules that it has been told of before their import.
pytest.register_assert_rewrite("fluidtune.testing.device_source")
