"""Placement: which models stand on which GPUs, cut into how many stages, so that most requests make their SLOs.

Decided here: stages of a model (`stages`), what a placement attains (`simulator`), which models a group of GPUs holds
(`selection`), and how GPUs become groups (`search`). The rules are those of the paper AlpaServe (Li, Zheng, Zhong et
al., OSDI'23). Requests are not batched there.

docs/placement.md explains the words. Start reading with `served_models`. Nothing there has a clock: who searches asks
for the next step, or does not.
"""
