"""Algorithm-blind workers: they score tokens and add gradients, and never ask which algorithm made the streams."""
