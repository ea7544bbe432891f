"""The protocols of the serving room's exchangeable parts, as tests that an implementation inherits. Needs pytest.

| module | what it proves |
| --- | --- |
| `batch_formers` | a `symphony_serve.batching.BatchFormer` |

The test file of a new implementation is a fixture and an import; each module shows it in its first lines.
"""

from __future__ import annotations

import pytest

# pytest explains a failed assertion only in modules that it has been told of before their import.
pytest.register_assert_rewrite(f"{__name__}.batch_formers")
