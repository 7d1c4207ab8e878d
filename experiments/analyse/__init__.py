"""From run folders to the tables of one study: ``python -m experiments.analyse --study S --scale ci``."""
