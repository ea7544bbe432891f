"""Calls of modules divided among devices: a trial's loop runs once, and `model(x)` is computed by several processes.

The *leader* is the trial's own process. Each *follower* holds replicas of modules and nothing of the script. docs/
divided.md has the decision, and what happens in each fault.

| module | its one idea |
| --- | --- |
| `leader` | takes followers in, looks which modules are called, and what the driver hears of it |
| `module_calls` | the calls of one module: which are divided, which stay whole, and why |
| `followers` | which followers there are, what each has, and how much of a batch each gets |
| `call` | one divided call, forward and backward, and what is done when a follower is lost |
| `follower` | serves a leader: replicas, checks, and graphs of parts |
| `checks` | whether a call can be divided: a follower computes it whole and in parts, and compares |
| `computation` | a module computed in this process on a call or a part, and its graph |
| `description` | a module as it is, and whether it has changed since |
| `parts` | where inputs are cut, and how outputs are joined |
| `trees` | values and modules as bytes and tensors |
| `whole_draws` | what a forward draws is drawn for the whole batch |
| `batch_statistics` | batch normalisation over the whole batch |
| `flags` | settings of torch that change numbers, and go with a call |
| `weights` | weights go out when their bytes have changed |
| `pair` | tensors of GPUs, by NCCL |
| `tensor_link` | messages with tensors between two processes |
| `meeting` | how a follower finds its leader, and both know each other |
| `torch_private` | what is used of torch that torch does not publish |
"""

from __future__ import annotations
