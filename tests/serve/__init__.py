import pytest

# pytest explains a failed assertion only in modules that it has been told of before their import.
pytest.register_assert_rewrite(f"{__name__}.batch_formers")
