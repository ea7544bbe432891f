"""A job's devices, and what holds them.

`device_source` is what a job asks. Its four implementations: `on_demand_devices`, for which `holding` decides,
`reservation`, `leased_devices`, and `sound_devices` around one of these. `layout` says what a device is.
"""
