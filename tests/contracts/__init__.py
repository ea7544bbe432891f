"""The protocols of FluidTune's exchangeable parts, as tests that an implementation inherits. Needs pytest.

| module | what it proves |
| --- | --- |
| `device_sources` | a `fluidtune.cluster.devices.device_source.DeviceSource` |
| `worker_sessions` | a `fluidtune.elastic.LeaderSession` |

The test file of a new implementation is a fixture and an import; each module shows it in its first lines. `processes`
are real processes for tests that need several.
"""

from __future__ import annotations

import pytest

# pytest explains a failed assertion only in modules that it has been told of before their import.
pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in ("device_sources", "worker_sessions")))
