"""A tenant of the arbiter, for tests of what holds leases."""

from __future__ import annotations

from themis_bridge.locality import Gpu


def gpu(number: int) -> Gpu:
    return Gpu(f"m-{number}", "m")


class FakeTenant:
    """What the arbiter's side says is put into ``notices``; the leases that were left are in ``left``."""

    def __init__(self, app, work, bundle, unit, user="", together=1):
        self.app, self.work, self.user, self.together = app, work, user, together
        self.expects = False
        self.notices, self.left, self.closed = [], [], False

    def poll(self):
        notices, self.notices = self.notices, []
        return notices

    def vacated(self, name, token):
        self.left.append((name, token))

    def group(self, lease):
        return lease.gpu.id, lease.token

    def close(self):
        self.closed = True
