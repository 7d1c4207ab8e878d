"""Rounding to a few bits by blocks, and means of what was rounded."""
