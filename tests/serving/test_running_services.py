"""Which service somebody means, by its name and whose it is."""

from __future__ import annotations

import pytest
import ray

from fluidtune.errors import FluidTuneError
from fluidtune.serving.running_services import RunningService, check_name, chosen, known

ANNAS, BERTS = RunningService("digits", "anna"), RunningService("faces", "bert")


@pytest.mark.parametrize(
    ("there", "name", "user", "changes", "found"),
    [
        ([ANNAS, BERTS], None, "anna", True, ANNAS),
        ([ANNAS], None, "bert", False, ANNAS),
        ([ANNAS, BERTS], "faces", "anna", False, BERTS),
        ([], None, "anna", False, "nothing is served in this Ray cluster; start it with: fluidtune serve start"),
        ([ANNAS], "face", "anna", False, r"has no service 'face'; it has digits \(user anna\)"),
        ([ANNAS, BERTS], None, "carl", False, r"several services; give .* digits \(user anna\), faces \(user bert\)"),
        ([ANNAS], None, "bert", True, "service 'digits' is of user anna, and you are bert; .* serve --user anna"),
    ],
)
def test_which_service_is_meant(there, name, user, changes, found):
    if isinstance(found, RunningService):
        assert chosen(there, name, user, changes) == found
    else:
        with pytest.raises(FluidTuneError, match=found):
            chosen(there, name, user, changes)


def test_actors_of_other_names_are_no_services(monkeypatch):
    """Seen: the front of an older version, which is called "serving", made every command a traceback."""
    named = [{"name": name, "namespace": "fluidtune"} for name in ("serving", "arbiter", ANNAS.actor)]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: named)
    assert known() == [ANNAS]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (ANNAS, "of user anna; .* or end that one first: fluidtune serve --user anna stop --name digits$"),
        (RunningService("digits", "bert"), r"'digits' already, of user anna; give another name \(--name\)$"),
        (RunningService("a/b", "bert"), "name is 'a/b', expected printable characters without '/'"),
    ],
)
def test_a_name_that_a_service_cannot_have(one, said):
    with pytest.raises(FluidTuneError, match=said):
        check_name(one, [ANNAS, BERTS])
