"""The auction by brute force: tries every combination of rows, as pseudocode 1 is written."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping

from themis_bridge import Bid
from themis_bridge.locality import Gpu


def random_bids(rng: random.Random, apps: int, gpus: list[str]) -> list[Bid]:
    """Bids on random subsets; each row has a smaller rho than every listed subset of it."""
    bids = []
    for app in range(apps):
        rows = {frozenset(rng.sample(gpus, rng.randint(1, len(gpus)))) for _ in range(rng.randint(0, 6))}
        table = {frozenset(): rng.uniform(1, 10)}
        for row in sorted(rows, key=lambda row: (len(row), sorted(row))):
            table[row] = min(rho for other, rho in table.items() if other < row) * rng.uniform(0.3, 0.999)
        bids.append(Bid(f"app{app}", table))
    return bids


def kinds_in(row: Iterable[str], where: Mapping[str, Gpu]) -> Counter[str]:
    """How many GPUs of each kind the row has: all that an auction looks at in a bid whose gang is 1."""
    return Counter(where[gpu].kind for gpu in row)


def best(tables: list[dict[frozenset[str], float]], where: Mapping[str, Gpu]) -> tuple[float, list[frozenset[str]]]:
    """The largest sum of log(1/rho) over rows for which there are GPUs enough of each kind, and those rows."""
    top, winners = -math.inf, []
    for rows in itertools.product(*tables):
        if kinds_in(itertools.chain(*rows), where) <= kinds_in(where, where):
            value = sum(-math.log(table[row]) for table, row in zip(tables, rows, strict=True))
            if value > top:
                top, winners = value, list(rows)
    return top, winners


def clear(bids: list[Bid], where: Mapping[str, Gpu]) -> tuple[dict[str, frozenset[str]], dict[str, float]]:
    """App -> its row in the proportionally fair allocation, and app -> its payment."""
    tables = [dict(bid.rho) for bid in bids]
    _, rows = best(tables, where)
    payments = {}
    for i, bid in enumerate(bids):
        others = tables[:i] + tables[i + 1 :]
        present = sum(-math.log(tables[j][rows[j]]) for j in range(len(bids)) if j != i)
        payments[bid.app] = math.exp(present - best(others, where)[0]) if others else 1.0
    return {bid.app: row for bid, row in zip(bids, rows, strict=True)}, payments
