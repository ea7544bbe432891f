"""Tools of the repository, which users do not install.

`horovod` builds Horovod's wheel (`make horovod`). `house_rules` and `ray_boundary` are checks of `make lint`.
"""
