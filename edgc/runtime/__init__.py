"""The process that it all runs in: devices, process groups, clocks, names in profiles."""
