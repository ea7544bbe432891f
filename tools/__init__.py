"""Tools of the repository, which users do not install.

`house_rules` and `ray_boundary` are checks of `make lint`.
"""
