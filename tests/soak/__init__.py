"""Long random training that looks for bugs, and kills (``make soak``); a hundredth is ``integration/test_soak.py``."""
