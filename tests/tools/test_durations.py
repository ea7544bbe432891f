from __future__ import annotations

from tools.durations import by_file

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.tune.test_parity" name="test_a" time="2.5"/>
<testcase classname="tests.tune.test_resources.TestCPUs" name="test_b[1]" time="1.0"/>
<testcase classname="tests.tune.test_resources.TestGPUs" name="test_c" time="0.25"/>
</testsuite></testsuites>"""


def test_seconds_are_added_up_by_file():
    assert by_file(REPORT) == {"tests/tune/test_parity.py": (1, 2.5), "tests/tune/test_resources.py": (2, 1.25)}
