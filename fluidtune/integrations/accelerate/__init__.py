"""Trials of Accelerate's loops that grow and shrink: an accelerator that is one process at every width.

    accelerator = ElasticAccelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in accelerator.epochs(0, 10):
        ...

`elastic_accelerator` hands what is prepared to `elastic.prepare`; `divided_loader` has Accelerate's loader read parts
of batches. Evaluation is not divided. What cannot be divided keeps the trial at one worker, and a line of the event
log says why.
"""

from .elastic_accelerator import ElasticAccelerator

__all__ = ["ElasticAccelerator"]
