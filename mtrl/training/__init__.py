"""The loop, what it is built from, and how a model is validated."""
