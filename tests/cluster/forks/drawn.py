"""What a process has drawn at random or read of the clock, as far as its modules hold it: ``python drawn.py MODULES``.

It imports the modules and prints one JSON object: name -> value, of all variables of modules, of attributes of classes,
and of objects in variables, that are texts, bytes, numbers, or generators of random numbers.
"""

import hashlib
import importlib
import json
import random
import sys
import time
import uuid

PLAIN = (str, bytes, int, float, uuid.UUID)


#: Where something is in this process' memory, after the imports.
MAPPED = []


def is_of_this_run(value):
    """Whether it is an address, a time, or too small a number for a draw."""
    if type(value) is float:
        return abs(value - time.time()) < 3600 or abs(value - time.monotonic()) < 3600
    if type(value) is not int:
        return False
    return abs(value) < 1 << 22 or any(low <= value < high for low, high in MAPPED)


def value_of(value):
    """What of it can be compared with another process; None: nothing."""
    if type(value) in PLAIN:
        return None if is_of_this_run(value) else repr(value)[:200]
    numpy = sys.modules.get("numpy.random")
    state = None
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        state = value.getstate()
    elif numpy is not None and type(value) is numpy.Generator:
        state = value.bit_generator.state
    elif numpy is not None and type(value) is numpy.RandomState:
        state = [str(each) for each in value.get_state()]
    elif numpy is not None and type(value) is numpy.SeedSequence:
        state = value.entropy
    elif type(value).__name__ == "Generator" and type(value).__module__.startswith("torch"):
        state = value.get_state().tolist()
    return None if state is None else hashlib.sha256(repr(state).encode()).hexdigest()


def found():
    """Name -> value."""
    values = {}
    for name, module in list(sys.modules.items()):
        if name == "__main__" or module is None:
            continue
        for variable, value in list(object.__getattribute__(module, "__dict__").items()):
            place = f"{name}.{variable}"
            said = value_of(value)
            if said is not None:
                values[place] = said
                continue
            try:
                inner = dict(object.__getattribute__(value, "__dict__"))
            except Exception:
                continue
            if type(value).__name__ != "module":
                for each, what in inner.items():
                    said = value_of(what)
                    if said is not None:
                        values[f"{place}.{each}"] = said
    return values


if __name__ == "__main__":
    for each in sys.argv[1:]:
        importlib.import_module(each)
    with open("/proc/self/maps") as file:
        MAPPED += [[int(end, 16) for end in line.split()[0].split("-")] for line in file]
    print("\n" + json.dumps(found()))
