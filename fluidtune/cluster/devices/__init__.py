"""A job's devices, and what holds them.

`device_source` is what a job asks. Its two implementations: `on_demand_devices`, for which `holding` decides, and
`leased_devices`. `layout` says what a device is.
"""
