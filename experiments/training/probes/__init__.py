"""Studies of gradients: what they record while a run trains."""
