"""Steady draws give every sample the same, move no stream, and leave alone what they do not know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributions import Beta, Categorical, Normal

from fluidtune.elastic.checks.steady_draws import SteadyDraws
from fluidtune.elastic.random_streams import capture_streams

#: A draw for a batch, by its number of samples.
DRAWS: dict[str, Callable[[int], torch.Tensor]] = {
    "randn": lambda n: torch.randn(n, 3),
    "randn_like": lambda n: torch.randn_like(torch.zeros(n, 3)),
    "normal_": lambda n: torch.empty(n, 3).normal_(2.0, 3.0),
    "normal": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "normal of a mean": lambda n: torch.normal(torch.ones(n), 2.0),
    "rand": lambda n: torch.rand(n),
    "uniform_": lambda n: torch.empty(n).uniform_(-1.0, 4.0),
    "log_normal_": lambda n: torch.empty(n).log_normal_(),
    "exponential_": lambda n: torch.empty(n).exponential_(2.0),
    "bernoulli of p": lambda n: torch.bernoulli(torch.zeros(n), p=0.9),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.7)),
    "bernoulli_": lambda n: torch.zeros(n).bernoulli_(0.7),
    "randint": lambda n: torch.randint(3, 9, (n,)),
    "randint below": lambda n: torch.randint(9, (n,)),
    "random_": lambda n: torch.zeros(n).random_(2, 5),
    "multinomial": lambda n: torch.multinomial(torch.tensor([[0.2, 0.5, 0.3]]).expand(n, 3), 1),
    "Normal": lambda n: Normal(0.0, 1.0).rsample((n, 3)),
    "Categorical": lambda n: Categorical(torch.tensor([[0.2, 0.8]]).expand(n, 2)).sample(),
    "gumbel_softmax": lambda n: torch.nn.functional.gumbel_softmax(torch.ones(n, 3)),
    "a generator": lambda n: torch.rand(n, generator=GENERATOR),
}
GENERATOR = torch.Generator().manual_seed(1)


@pytest.mark.parametrize("name", DRAWS)
def test_every_sample_gets_the_same_and_no_stream_moves(name):
    before, own = capture_streams()["torch"], GENERATOR.get_state()
    with SteadyDraws(lambda: True):
        eight, two = DRAWS[name](8), DRAWS[name](2)
    assert torch.equal(capture_streams()["torch"], before) and torch.equal(GENERATOR.get_state(), own)
    assert torch.equal(eight, eight[:1].expand_as(eight)) and torch.equal(eight[:2], two)
    assert bool(eight.isfinite().all())


def test_a_permutation_stays_one_and_an_unknown_distribution_is_drawn_from():
    with SteadyDraws(lambda: True):
        assert torch.randperm(5).tolist() == [0, 1, 2, 3, 4]
        torch.manual_seed(3)
        unknown = Beta(2.0, 3.0).sample((4,))
    torch.manual_seed(3)
    assert torch.equal(unknown, Beta(2.0, 3.0).sample((4,)))


def test_nothing_is_held_before_it_is_active():
    torch.manual_seed(3)
    with SteadyDraws(lambda: False):
        drawn = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.randn(4))
