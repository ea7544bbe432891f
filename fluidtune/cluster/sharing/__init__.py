"""How the trials of one device share it: `salus_share` in a worker process.

`lanes` and `mps` are a worker's part in lanes and in NVIDIA MPS, `beside` turns on a core between a search and a
service, `gpu_probe` what a worker sees of its GPU.
"""
