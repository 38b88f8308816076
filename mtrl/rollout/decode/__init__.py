"""Decoding on CUDA: one graph per step over static buffers, from the last tokens to the next ones and their
log-probs."""
