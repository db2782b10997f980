"""Traffic between machines in one training step, computed from sizes, for several schemes."""
