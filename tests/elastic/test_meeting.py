"""How the members of a group meet: the leader's view of which followers live, and Horovod's rendezvous."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from fluidtune.elastic.transport.liveness import FollowerConnections, LeaderConnection
from fluidtune.elastic.transport.rendezvous import Rendezvous
from fluidtune.elastic.transport.signing import Signer
from tests.contracts.processes import until

SIGNER = Signer(b"the trial's secret")


def connected(followers, signer=SIGNER):
    """A follower's connection."""
    return LeaderConnection("127.0.0.1", followers.invitation, signer, 5.0)


@pytest.fixture
def followers():
    made = FollowerConnections("127.0.0.1", SIGNER)
    yield made
    made.close()


def door(followers):
    """Where the leader listens."""
    return "127.0.0.1", int(followers.invitation.split()[0])


def test_a_follower_lives_as_long_as_its_connection(followers):
    assert followers.alive((1, 1)) is None
    first, second = (connected(followers) for _ in range(2))
    first.say_place((1, 1))
    second.say_place((1.001, 2))
    until(lambda: followers.alive((1, 1)))
    until(lambda: followers.alive((1.001, 2)))
    first.close()
    until(lambda: followers.alive((1, 1)) is False)
    assert followers.alive((1.001, 2)) is True
    followers.forget(1.001)
    assert followers.alive((1, 1)) is None and followers.alive((1.001, 2)) is True
    second.close()


def test_a_stranger_at_the_door_does_no_harm(followers):
    follower = connected(followers)
    with socket.create_connection(door(followers)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n\xff\n\n")
        follower.say_place((1, 1))
        until(lambda: followers.alive((1, 1)))
    follower.close()


def test_a_place_counts_only_with_the_trials_signature(followers):
    stranger = connected(followers, Signer(b"another secret"))
    stranger.say_place((1, 1))
    until(lambda: followers.alive((1, 1)) is None and SIGNER.refused > 0)
    with pytest.raises(OSError):
        for rank in range(1000):
            stranger.say_place((2, rank))
            time.sleep(0.01)
    stranger.close()


def test_a_line_that_was_overheard_is_of_no_use_on_another_connection(followers):
    follower = connected(followers)
    heard = []
    follower._connection = SimpleNamespace(
        sendall=heard.append,
        getsockname=follower._connection.getsockname,
        getpeername=follower._connection.getpeername,
        close=follower._connection.close,
    )
    follower.say_place((1, 1))
    before = SIGNER.refused
    with socket.create_connection(door(followers)) as stranger:
        stranger.sendall(heard[0])
        until(lambda: followers.alive((1, 1)) is None and SIGNER.refused > before)
        assert stranger.recv(1) == b""
    follower.close()


def test_a_stranger_that_never_ends_its_line_is_closed(followers):
    before = SIGNER.refused
    with socket.create_connection(door(followers)) as stranger:
        stranger.sendall(b"1" * 1000)
        until(lambda: followers.alive((1, 1)) is None and SIGNER.refused > before)


def test_a_follower_that_takes_another_place_never_looks_dead(followers):
    follower = connected(followers)
    follower.say_place((1, 2))
    until(lambda: followers.alive((1, 2)))
    followers.move({(1, 2): (1.001, 1)})
    assert followers.alive((1.001, 1)) is True
    follower.say_place((1.001, 1))
    follower.say_place((2, 1))
    until(lambda: followers.alive((2, 1)))
    assert followers.alive((1, 2)) is followers.alive((1.001, 1)) is True
    follower.close()
    until(lambda: followers.alive((2, 1)) is False)
    assert followers.alive((1, 2)) is followers.alive((1.001, 1)) is False


def test_a_leader_that_is_gone_is_an_error():
    made = FollowerConnections("127.0.0.1", SIGNER)
    made.close()
    with pytest.raises(OSError):
        connected(made)


@pytest.fixture
def server():
    made = Rendezvous("127.0.0.1", {"/rank_and_size/w1:0": b"1,2,0,1,1,2"})
    yield made
    made.close()


def ask(server, path, method="GET", data=None):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data=data, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
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


@pytest.mark.parametrize("length", [str(10**12), "-1", "many"])
def test_nobody_fills_the_memory_of_a_rendezvous(server, length):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as stranger:
        stranger.sendall(f"PUT /global/0 HTTP/1.1\r\nContent-Length: {length}\r\n\r\nxyz".encode())
        assert b" 413 " in stranger.recv(100)
    assert "/global/0" not in server.values
