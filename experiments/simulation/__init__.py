"""Clusters that we do not have: what a step would send, hold and cost there. Simulated, and said so."""
