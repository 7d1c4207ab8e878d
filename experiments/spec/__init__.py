"""Settings of a run, studies and scales, and the one check of all of them."""
