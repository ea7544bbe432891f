"""The six functions that a user's training loop calls. Without a session they do what plain PyTorch does.

Only a FluidTune worker has a session. A script that runs under stock Ray Tune or plain Python gets its own objects
back, `range`, and its own mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .data.plain_state import State
from .group.current_session import current


def prepare(*objects: Any) -> Any:
    """Hand over what the trial consists of: modules, optimizers, LR schedulers, DataLoaders, gradient scalers, random
    generators of the loop's own, and any other object with ``state_dict`` and ``load_state_dict``.

    A joiner begins with these as the leader has them, and with all else as it is when the code begins: put plain
    values, such as a counter of steps, into `state`. What was prepared is kept until the trial ends: a cross-validation
    that prepares a model for each fold has the memory of all of them.

    Returns the same objects in the same order, as a tuple; a single object is returned alone. A DataLoader comes back
    as a wrapper that yields this worker's share of each batch (see `whole_batches`). Call `prepare` when the objects
    are on their device, and before `epochs`. The loss must be a mean over the samples of the batch: gradients are
    weighted by the number of samples that this worker had.

    A loop may fetch batches ahead, put several into one backward pass, or read loaders in step, as long as these
    batches are divided alike: their sizes are equal, or multiples of the width. Otherwise the trial goes on with one
    worker, and an event says why.

    An optimizer that calls a closure, as LBFGS does, gets the loss of the whole batch, if the closure calls
    ``backward()`` on what it returns.

    After each growth all workers compute the first batches whole, from the leader's random streams, and the leader's
    gradients count: two batches if the loop counts its samples by `samples`, else the batches of one turn. Where a new
    worker's gradients or weights are not the leader's, the trial goes on with one worker, with the results that it has
    alone, and an event says what differed.

    What differs may matter later only. The first four turns of a grown trial begin with a batch that all compute whole,
    then the 8th, 16th, 32nd .. since the growth, if the loop counts by `samples`. So do the first four evaluations over
    a prepared DataLoader, the 8th, 16th ..: there, what modules return is compared. (One that does not count by
    `samples`, as ``update_bn``, is whole to its end then.) That is at most 2 + log2(n) batches of n turns. What differs
    in the training of a later turn may come of the leader's part of earlier batches: the trial begins anew with one
    worker, and Tune hears of no iteration twice. A turn between two comparisons is not looked at.

    What is evaluated over data that is not prepared, such as a small DataLoader, counts in the leader alone, if it is
    counted by `samples` without gradients, after the prepared DataLoaders are read to their ends. A loop that divides
    such data by `fluidtune.elastic.rank` is left alone.

    A trial is not grown whose DataLoader is of a class with its own ``__iter__``, as only that makes its batches.

    A trial is not grown whose loop, at the first step of a turn, still has samples of the turn before, as with hard
    examples or a replay. It is seen in batches of torch's `default_collate`, and not in copies.

    What the loop draws from the default streams of Python, numpy and torch between two batches, or from a generator
    that it has prepared, is the same in all workers. What the dataset draws, and the dropout of torch.nn, differ from
    worker to worker. Other numbers that the loop draws for each sample (``torch.randn_like``, the dropout inside a
    recurrent layer or an attention kernel) are the same for the first, second .. sample of each worker's part.

    With several workers these are wrong, because they need all samples of the batch at once, or never meet the sum of
    the gradients:

    - a mean that is not over the samples: weights of classes (``CrossEntropyLoss(weight=...)``), ``ignore_index``, a
      mean over tokens of sequences of different lengths, ``reduction="sum"``;
    - a loss between samples: contrastive losses, in-batch negatives, a matrix of distances, an AUC loss;
    - a loss that also has samples of earlier batches, or follows what was computed of them: a memory bank, a queue of
      negatives, weights of losses or a temperature that follow the loss of a worker's part. It is found in one of the
      compared batches, and not in the turns between;
    - an average of weights that is not prepared and is evaluated for the first time in an evaluation that is not
      compared, or by ``len`` instead of `samples`;
    - gradients that ``backward()`` does not accumulate: ``torch.autograd.grad`` followed by an update by hand;
    - a hook on a parameter's gradient that is not linear, such as clipping: it sees the gradient of the share;
    - a parameter or layer that is made or replaced after `prepare`; prepare the new one too;
    - a step of a plateau scheduler by the loss of a batch, and weights that a layer writes while it is read
      (``Embedding(max_norm=...)``): each worker has the loss, or reads the samples, of its part;
    - a decision by the length of a batch, such as ``if len(x) < 2: continue``: it sees this worker's part. A batch that
      is left out for that is found, and the trial goes on with one worker. Other decisions are not found.

    Give such a trial one worker (``max_workers=1``). A trial whose loop changes the weights of a sampler is not grown,
    as each worker has the losses of its part. Most of the others are found: before the first growth of a job, the
    new worker computes up to eight steps whole and divided (`rehearsal`). If the gradients differ, an event names the
    parameter, the trial keeps one worker, and from then on every growth in the job is checked; so with what the steps
    have made of schedulers, of `state` and of weights that no optimizer moves. With the environment
    variable ``FLUIDTUNE_CHECK=1`` in the driver every growth is. A check takes the new worker three runs of the code
    up to its first three optimizer steps (up to eight, if they are short), with the memory of two models; the trial
    trains on meanwhile. A loop that itself draws random numbers for each sample, by other means than torch's, is not
    grown if its gradients differ. What begins after these steps is not seen.

    Raises:
        TypeError: an object has no ``state_dict`` and ``load_state_dict``; the data of a DataLoader cannot be divided,
            as it has an IterableDataset or ``batch_size=None``; a module has sparse embeddings, or is lazy.
    """
    session = current()
    prepared = objects if session is None else session.prepare(*objects)
    return prepared[0] if len(prepared) == 1 else prepared


def state(**values: Any) -> State:
    """Plain values of the loop that are part of the trial: a counter of steps, a weight that changes, a best loss.

        progress = elastic.state(steps=0)
        ...
        progress.steps += 1

    The values are attributes of what is returned: numbers, strings, tensors, lists and dicts of them, and what can be
    pickled. A worker that joins the trial gets the leader's, and a trial that is restarted those of its last commit.
    They must be the same in all workers: what each computes from its share of a batch is not (see `mean`). Call it
    where `prepare` is called. An object of a class that the script itself defines, and of which no value is there when
    the loop begins, has a class of its own after `Tuner.restore`: define such a class in a module.

    Raises:
        TypeError: a name is ``state_dict`` or ``load_state_dict``.
    """
    made: State = prepare(State(**values))
    return made


def epochs(start: int, stop: int) -> Iterable[int]:
    """Yield start .. stop-1, without a length. Before each of them is a boundary, at which the trial can be resized.

    Call it in the outer loop only: inside another `epochs` it is a plain `range`, and the trial is not grown. One that
    was left by ``break`` has ended when nothing holds it any more: iterate over it, or over a ``tqdm`` of it, in the
    ``for``, and keep it in no variable. Nor is a trial grown whose loop keeps an iterator over a DataLoader from one
    turn to the next, or changes what it has prepared.

    After a restart it goes on from the epoch of the last commit. If Tune has restored a newer checkpoint, or ``start``
    is beyond that epoch, the commit is not used. Loops are told apart by the order of these calls: a loop that is done
    by the user's own checkpoint is called as well, with ``start == stop``.
    """
    session = current()
    return range(start, stop) if session is None else session.epochs(start, stop)


def is_leader() -> bool:
    """Whether this worker is the one that runs the trial for Tune; True as well where there is only one.

    Use it around side effects that FluidTune cannot keep to one worker (see `fluidtune.elastic`). Never call `prepare`,
    `mean` or the model in training mode under it: all workers take part in these.
    """
    session = current()
    return session is None or session.leader


def samples(n: int) -> int:
    """The number of the ``n`` samples of the current batch that count for this worker: n, or 0.

    It is 0 for a surplus worker, when the batch has fewer samples than the trial has workers. Such a worker gets a
    stand-in, a copy of another worker's sample, so that it takes part in the step. A mean must not count the stand-in.
    """
    session = current()
    return n if session is None else session.samples(n)


def mean(total: float | torch.Tensor, count: float | torch.Tensor) -> float:
    """The mean over all workers' samples: the sum of their ``total`` divided by the sum of their ``count``.

    ``total`` is the sum of a quantity over the samples that this worker had, ``count`` the number of these samples (see
    `samples`), and not ``len(loader.dataset)``. Every worker must call it, and gets the same number.

    Raises:
        ZeroDivisionError: no worker had a sample.
    """
    session = current()
    if session is None:
        return float(total) / float(count)
    return session.mean(float(total), float(count))
