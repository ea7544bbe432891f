"""The six models of AlpaServe: seconds of each stage and bytes, by shape, as recorded on V100 GPUs of 16 GB.

Sequence length 2048, batch 1. Each shape (OPxPP) has the milliseconds of its stages, rounded to .1, and the GiB of the
largest stage on each of its GPUs. Source: the profile that belongs to AlpaServe's public code (alpa-projects/mms).
"""

from __future__ import annotations

from symphony_serve.placement.served_models import Cut, ServedModel, Shape

_GIB = 2**30
#: Seconds of a request besides its stages. Source: AlpaServe's simulator (alpa-projects/mms).
DELAY_S = 0.011
_TEXT = """
bert-1.3b 1x1 151.1 (2.644); 1x2 75.1 77.3 (1.323); 1x4 39.0 37.5 42.0 35.9 (.698);
  1x8 17.3 19.2 19.0 23.0 19.6 22.5 20.4 18.4 (.385); 2x1 106.6 (1.322); 2x2 53.2 47.0 (1.180);
  2x4 27.1 29.7 25.3 26.7 (.512); 4x1 60.0 (.661); 4x2 31.0 27.1 (1.110); 8x1 43.4 (.331)
bert-2.6b 1x1 237.6 (5.180); 1x2 116.7 120.1 (2.591); 1x4 63.9 58.5 62.0 59.2 (1.368);
  1x8 28.7 30.8 29.2 33.1 31.7 33.4 30.9 28.6 (.686); 2x1 159.8 (2.591); 2x2 72.8 73.0 (2.296);
  2x4 41.1 46.2 36.5 36.4 (1.056); 4x1 88.6 (1.296); 4x2 46.0 39.7 (2.149); 8x1 64.3 (.648)
bert-6.7b 1x1 395.1 (12.788); 1x2 196.6 199.2 (6.396); 1x4 97.3 101.1 101.7 98.7 (3.266);
  1x8 49.6 48.4 49.2 49.5 47.9 53.9 54.7 51.5 (1.766); 2x1 262.4 (6.395); 2x2 132.2 115.9 (5.642);
  2x4 66.1 67.9 71.1 60.6 (3.016); 4x1 152.5 (3.198); 4x2 76.5 64.8 (5.267); 8x1 99.2 (1.600)
moe-1.3b 1x1 149.7 (2.559); 1x2 74.5 76.8 (1.282); 1x4 31.8 44.4 43.0 34.7 (.657);
  1x8 13.0 19.3 19.3 19.5 18.2 27.3 25.8 17.0 (.349); 2x1 96.8 (1.279); 2x2 48.6 44.1 (1.263);
  2x4 19.2 29.3 25.3 23.4 (.629); 4x1 57.1 (.640); 4x2 29.8 45.3 (.322); 8x1 42.6 (.320)
moe-2.4b 1x1 170.8 (4.506); 1x2 83.2 87.7 (2.257); 1x4 36.9 41.2 50.4 46.2 (1.155);
  1x8 15.5 21.5 21.8 22.0 21.8 20.6 30.5 26.2 (.608); 2x1 111.7 (2.253); 2x2 52.9 50.3 (2.225);
  2x4 23.4 33.8 28.1 25.7 (1.118); 4x1 64.2 (1.127); 4x2 34.7 48.7 (.566); 8x1 47.6 (.563)
moe-5.3b 1x1 234.0 (10.040); 1x2 115.4 118.9 (5.026); 1x4 61.9 56.2 55.8 62.5 (2.564);
  1x8 33.2 29.1 28.0 28.3 29.2 28.5 28.9 35.7 (1.334); 2x1 153.2 (5.020); 2x2 76.9 66.8 (4.961);
  2x4 34.0 45.4 37.4 34.9 (2.516); 4x1 84.5 (2.510); 4x2 44.3 41.1 (1.546); 8x1 60.7 (1.255)
"""


def _cuts() -> dict[str, dict[Shape, Cut]]:
    found: dict[str, dict[Shape, Cut]] = {}
    for line in _TEXT.replace("\n  ", " ").strip().splitlines():
        name, rest = line.split(" ", 1)
        found[name] = {}
        for part in rest.split(";"):
            shape, *milliseconds, size = part.split()
            op, pp = map(int, shape.split("x"))
            seconds = tuple(float(one) / 1e3 for one in milliseconds)
            found[name][Shape(op, pp)] = Cut(seconds, float(size.strip("()")) * _GIB)
    return found


#: Name of a model -> its cuts, without overhead.
CUTS = _cuts()


def recorded_model(name: str, kind: str, scale: float) -> ServedModel:
    """A model of this kind, with the simulator's overheads. Its SLO is ``scale`` times its latency alone."""
    cuts = CUTS[kind]
    slowed = {shape: cut.slowed() for shape, cut in cuts.items()}
    return ServedModel(name, slowed, scale * cuts[Shape(1, 1)].latency, delay=DELAY_S)
