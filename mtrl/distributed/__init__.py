"""Several machines or GPUs as one crew of ranks, by Ray. This room alone imports ray, and nothing else needs it."""
