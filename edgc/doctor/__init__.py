"""Would compression pay on this cluster? ``python -m edgc.doctor`` measures it."""
