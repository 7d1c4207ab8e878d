"""GDS (Gradient Data Sampler): the entropy of gradients from a share of their entries and iterations."""
