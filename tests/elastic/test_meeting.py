"""How the members of a group meet: the leader's view of which followers live, and Horovod's rendezvous."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from fluidtune.elastic.backends.liveness import FollowerConnections, LeaderConnection
from fluidtune.elastic.backends.rendezvous import Rendezvous


@pytest.fixture
def followers():
    made = FollowerConnections("127.0.0.1")
    yield made
    made.close()


def soon(look, expected):
    deadline = time.monotonic() + 5
    while look() is not expected:
        assert time.monotonic() < deadline, look()
        time.sleep(0.001)


def test_a_follower_lives_as_long_as_its_connection(followers):
    assert followers.alive((1, 1)) is None
    first, second = (LeaderConnection(("127.0.0.1", followers.port), 5.0) for _ in range(2))
    first.say_place((1, 1))
    second.say_place((1.001, 2))
    soon(lambda: followers.alive((1, 1)), True)
    soon(lambda: followers.alive((1.001, 2)), True)
    first.close()
    soon(lambda: followers.alive((1, 1)), False)
    assert followers.alive((1.001, 2)) is True
    followers.forget(1.001)
    assert followers.alive((1, 1)) is None and followers.alive((1.001, 2)) is True
    second.close()


def test_a_stranger_at_the_door_does_no_harm(followers):
    follower = LeaderConnection(("127.0.0.1", followers.port), 5.0)
    with socket.create_connection(("127.0.0.1", followers.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n\xff\n\n")
        follower.say_place((1, 1))
        soon(lambda: followers.alive((1, 1)), True)
    follower.close()


def test_a_follower_that_takes_another_place_never_looks_dead(followers):
    follower = LeaderConnection(("127.0.0.1", followers.port), 5.0)
    follower.say_place((1, 2))
    soon(lambda: followers.alive((1, 2)), True)
    followers.move({(1, 2): (1.001, 1)})
    assert followers.alive((1.001, 1)) is True
    follower.say_place((1.001, 1))
    follower.say_place((2, 1))
    soon(lambda: followers.alive((2, 1)), True)
    assert followers.alive((1, 2)) is followers.alive((1.001, 1)) is True
    follower.close()
    soon(lambda: followers.alive((2, 1)), False)
    assert followers.alive((1, 2)) is followers.alive((1.001, 1)) is False


def test_a_leader_that_is_gone_is_an_error():
    made = FollowerConnections("127.0.0.1")
    made.close()
    with pytest.raises(OSError):
        LeaderConnection(("127.0.0.1", made.port), 1.0)


@pytest.fixture
def server():
    made = Rendezvous("127.0.0.1", {"/rank_and_size/w1:0": b"1,2,0,1,1,2"})
    yield made
    made.close()


def ask(server, path, method="GET", data=None):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data=data, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def test_a_key_is_waited_for(server):
    assert ask(server, "/rank_and_size/w1:0") == b"1,2,0,1,1,2"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(server, "/global/1")
    got = []
    reader = threading.Thread(target=lambda: got.append(ask(server, "/global/0")))
    reader.start()
    time.sleep(0.02)
    ask(server, "/global/0", "PUT", b"an address")
    reader.join()
    assert got == [b"an address"]
    assert ask(server, "/global/0", "DELETE") == b""


def test_a_rendezvous_that_is_called_off_answers_at_once_with_an_empty_address(server):
    ask(server, "/global/0", "PUT", b"an address")
    server.call_off()
    assert ask(server, "/global/0") == ask(server, "/global/1") == b""
