"""Shockwave and Sia as policies of the arbiter: schedulers that solve a program in every round.

Both are by their published rules and constants, on the arbiter that all policies here share: they decide about the GPUs
on offer, while in their own simulators every job may be moved in every round. Each class says what else differs.
HiGHS solves the programs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from benchmarks.shared_cluster.apps import SWITCH_S, Facts
from benchmarks.shared_cluster.greedy import Rule, Supply
from themis_bridge.auction import Bid
from themis_bridge.policy import Situation
from themis_bridge.winner_determination import SilentHighs

#: Shockwave plans so many rounds of so many seconds. Source: "future_rounds" of its configurations/tacc_32gpus.json,
#: and rounds of two minutes (NSDI'23, section 7).
ROUNDS, ROUND_S = 20, 120.0
#: Shockwave's weight of the makespan, the power of the priority, and the largest ratio of finish times. Source: the
#: same file, "k", "lambda" and "rhomax".
MAKESPAN_WEIGHT, PRIORITY_POWER, RHO_MAX = 1e-3, 12.0, 1.0
#: Power of the priority of a job that ends within a round. Source: priority_M in Shockwave's scheduler/shockwave.py.
ENDING_POWER = 100.0
#: An app that is planned for less runs in no round. Judgement: above the solver's tolerance.
LEAST_ROUNDS = 1e-4
#: The largest priority. Judgement: beside it every other one is nothing in double precision.
MOST_PRIORITY = 1e30
#: Progress at which Shockwave's logarithm is exact; it is linear between two of them. Source: the same file,
#: "log_approximation_bases", and logapx_origin in scheduler/scheduler.py for the first one.
LOG_BASES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
LOG_ORIGIN = 1e-6
#: Weight of the average of fair finish times beside the last one. Source: finish_time_momentumed_average.
MOMENTUM = 0.9
#: Relative gap and seconds at which the solver stops. Source: the same file, "solver_rel_gap" and "solver_timeout".
GAP, SOLVE_S = 1e-3, 15.0
#: Sia's fairness power, what a job without GPUs costs, and the least goodput. Source: sia_default_p_val and
#: sia_default_lambda_n in sia-simulator/simulator_config.py, ZERO_ALLOC_GAIN in sia.py.
FAIRNESS_POWER, NO_GPUS_COST, LEAST_GOODPUT = -0.5, 1.1, 1e-4


class _Program:
    """A mixed-integer program to be minimised, column by column and row by row."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, float, float, bool]] = []
        self._rows: list[tuple[float, float]] = []
        self._starts, self._index, self._value = [0], list[int](), list[float]()

    def column(self, cost: float, lower: float, upper: float, integer: bool = False) -> int:
        """Add a column. Returns its number."""
        self._columns.append((cost, lower, upper, integer))
        return len(self._columns) - 1

    def row(self, terms: Mapping[int, float], lower: float, upper: float) -> None:
        """Add ``lower <= sum of terms <= upper``. ``terms``: column -> factor."""
        self._rows.append((lower, upper))
        self._index += terms.keys()
        self._value += terms.values()
        self._starts.append(len(self._index))

    def solve(self) -> np.ndarray | None:
        """The value of each column; None if there is no solution."""
        cost, lower, upper, integer = zip(*self._columns, strict=True)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(cost), len(self._rows)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.array(cost), np.array(lower), np.array(upper)
        lp.row_lower_ = np.array([row[0] for row in self._rows])
        lp.row_upper_ = np.array([row[1] for row in self._rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self._index, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self._value)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[each] for each in integer]
        solver = SilentHighs()
        for name, value in (("mip_rel_gap", GAP), ("time_limit", SOLVE_S)):
            solver.setOptionValue(name, value)
        solver.passModel(lp)
        solver.run()
        found = np.asarray(solver.getSolution().col_value)
        return found if solver.getSolution().value_valid and len(found) == len(cost) else None


@dataclass
class _Plan:
    """One app in Shockwave's program. Times are seconds.

    width: the GPUs that it takes while it runs.
    left: how long it still runs on them; share: the fraction of the time for which it fairly does.
    age: since its arrival; fair: from its arrival to its fair end.
    """

    width: int
    left: float
    share: float
    age: float
    fair: float
    done: float

    @property
    def ratio(self) -> float:
        """Its end if it runs for its fair share of the time from now on, divided by its fair end."""
        return (self.age + self.left / self.share) / self.fair

    @property
    def priority(self) -> float:
        """What its utility counts where not every app can end in its fair time."""
        if self.ratio <= RHO_MAX:
            return 1.0
        power = ENDING_POWER if self.left < ROUND_S else PRIORITY_POWER
        return math.exp(min(math.log(MOST_PRIORITY), power * math.log(self.ratio)))


@dataclass
class Shockwave(Rule):
    """Shockwave (NSDI'23): Nash social welfare over a window of rounds, less the makespan, under fair finish times.

    It maximises the sum of log(progress at the end of the window) less ``MAKESPAN_WEIGHT`` times the longest rest, so
    that every app can still end within ``RHO_MAX`` times its fair time. If there is no such plan, each utility is
    multiplied by a power of the app's ratio instead. Here, unlike in its simulator,

    - the program says for how many rounds of the window an app runs, not necessarily a whole number, and not in which;
      apps then get GPUs in the order of priority and number of rounds, and those without rounds the longest first, as
      there (whole numbers change little, because only that order is used, and take ten times as long);
    - the fair share of the time is GPUs / (apps * width), where its code has GPUs / apps, which is the same for apps of
      one GPU. That is the rho that is measured here;
    - times count from an app's arrival, where its code divides times of the clock.
    """

    #: App -> (age, fair time by the number of apps then) whenever it was asked.
    _seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        supply = Supply(situation, dense=True)
        gpus = len(situation.offer) + sum(map(len, situation.held.values()))
        width = {app: min(gpus, len(situation.held[app]) + supply.wants[app]) for app in situation.needs}
        facts = {app: need.report.facts for app, need in situation.needs.items() if width[app]}
        plans = {app: self._plan(app, each, width[app], gpus, len(facts)) for app, each in facts.items()}
        rounds, relaxed = _rounds(plans, gpus)
        priority = {app: plan.priority if relaxed else 1.0 for app, plan in plans.items()}
        none = {app: rounds[app] < LEAST_ROUNDS for app in plans}
        order = {app: (-priority[app], -rounds[app]) if not none[app] else (-plans[app].left, 0.0) for app in plans}
        for app in sorted(plans, key=lambda app: (none[app], *order[app], situation.needs[app].tie)):
            supply.give_gpus(app, supply.wants[app])
        return self.final(situation, supply.grants)

    def _plan(self, app: str, facts: Facts, width: int, gpus: int, apps: int) -> _Plan:
        share = min(1.0, gpus / (apps * width))
        whole = facts.budget / min(gpus, facts.demand)
        seen = self._seen.setdefault(app, [])
        seen.append((facts.age, whole / min(1.0, gpus / (apps * min(gpus, facts.demand)))))
        # Each fair time counts for as long as it was the last one.
        ends = [age for age, _ in seen[1:]] + [facts.age]
        weights = np.diff([seen[0][0], *ends])
        values = np.array([fair for _, fair in seen])
        mean = float(np.average(values, weights=weights)) if weights.sum() > 0 else float(values[-1])
        fair = MOMENTUM * mean + (1 - MOMENTUM) * float(values[-1])
        left = max(facts.value.finish((), {width: 1}), 1e-6)
        return _Plan(width, left, share, facts.age, fair, 1 - facts.service_left / facts.budget)


def _rounds(plans: Mapping[str, _Plan], gpus: int) -> tuple[dict[str, float], bool]:
    """App -> in how many rounds of the window it runs; and whether not every app can end in its fair time."""
    for relaxed in (False, True):
        found = _solve_window(plans, gpus, relaxed)
        if found is not None:
            return found, relaxed
    return dict.fromkeys(plans, 0.0), True


def _solve_window(plans: Mapping[str, _Plan], gpus: int, relaxed: bool) -> dict[str, float] | None:
    program = _Program()
    most = max([plan.priority for plan in plans.values()], default=1.0) if relaxed else 1.0
    rest = program.column(MAKESPAN_WEIGHT / most, 0.0, math.inf)
    rounds = {}
    for app, plan in plans.items():
        rounds[app] = program.column(0.0, 0.0, ROUNDS)
        run = program.column(0.0, 0.0, plan.left)
        weight = (plan.priority if relaxed else 1.0) / most / (len(plans) * ROUNDS)
        # The logarithm is concave, so that of all mixtures of bases the program takes two that are side by side.
        mix = {program.column(-weight * math.log(base or LOG_ORIGIN), 0.0, 1.0): base for base in LOG_BASES}
        program.row(dict.fromkeys(mix, 1.0), 1.0, 1.0)
        program.row({**mix, run: -(1 - plan.done) / plan.left}, plan.done, plan.done)
        program.row({run: 1.0, rounds[app]: -ROUND_S}, -math.inf, 0.0)
        program.row({rest: 1.0, run: 1.0}, plan.left, math.inf)
        if not relaxed:
            late = plan.age + ROUNDS * ROUND_S + plan.left / plan.share - RHO_MAX * plan.fair
            program.row({run: 1.0 / plan.share}, late, math.inf)
    program.row({rounds[app]: float(plan.width) for app, plan in plans.items()}, 0.0, float(gpus * ROUNDS))
    found = program.solve()
    return None if found is None else {app: float(found[column]) for app, column in rounds.items()}


@dataclass
class Sia(Rule):
    """Sia (SOSP'23) on GPUs of one kind: one number of GPUs for each app, so that a sum of powers is smallest.

    An app may have 1, 2, 4, ... GPUs of a machine, whole machines, or as many as it can use. Its goodput with each
    number is that with one GPU times the speed-up. If it has another number now, that is multiplied by the fraction of
    its life that it would not have spent on restarts. The sum over apps of goodput ** -0.5 is minimised; an app without
    GPUs costs 1.1, little more than one with a single GPU, which costs 1. Batch sizes are not tuned here, so goodput is
    throughput.
    """

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        supply = Supply(situation, dense=True)
        places = [*situation.offer.values(), *(gpu for held in situation.held.values() for gpu in held)]
        machine = max(Counter(gpu.machine for gpu in places).values())
        program = _Program()
        columns: dict[int, tuple[str, int]] = {}
        has = Counter(situation.holder.values())
        for app, need in situation.needs.items():
            kept = len(situation.held[app])
            sizes = [size for size in _configurations(machine, kept + supply.wants[app]) if size >= max(1, kept)]
            own = {}
            for size in {*sizes, kept} - {0}:
                goodput = _goodput(need.report.facts, size, machine, kept + has[app])
                own[program.column(goodput**FAIRNESS_POWER - NO_GPUS_COST, 0.0, 1.0, True)] = app, size
            if own:
                program.row(dict.fromkeys(own, 1.0), float(kept > 0), 1.0)
            columns |= own
        if columns:
            program.row({column: float(size) for column, (_, size) in columns.items()}, 0.0, float(len(places)))
            found = program.solve()
            chosen = [] if found is None else [columns[column] for column in columns if found[column] > 0.5]
            for app, size in sorted(chosen, key=lambda pair: (-pair[1], situation.needs[pair[0]].tie)):
                supply.give_gpus(app, size - len(situation.held[app]))
        return self.final(situation, supply.grants)


def _configurations(machine: int, most: int) -> Sequence[int]:
    """Numbers of GPUs up to ``most``: powers of two within a machine, then whole machines, and ``most`` itself."""
    powers = [1 << bit for bit in range(machine.bit_length()) if 1 << bit <= min(machine, most)]
    return sorted({*powers, *range(machine, most + 1, machine), *([most] if most > 0 else [])})


def _goodput(facts: Facts, size: int, machine: int, now: int) -> float:
    """Goodput on ``size`` GPUs, that on one GPU being 1, of an app that has ``now`` GPUs."""
    pieces = Counter({machine: size // machine}) + Counter({size % machine: 1} if size % machine else {})
    faster = facts.value.finish((), {1: 1}) / max(facts.value.finish((), pieces), 1e-9)
    if now not in (0, size) and facts.age >= SWITCH_S:
        faster *= max(facts.age - facts.restarts * SWITCH_S, 0.0) / (facts.age + SWITCH_S)
    return max(faster, LEAST_GOODPUT)
