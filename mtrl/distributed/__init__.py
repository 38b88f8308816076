"""A run on several processes, started by Ray or by torchrun. Only this package imports ray, and only if it is used."""
