"""Parallelism inside a model: process groups, FSDP2, sequence parallelism."""
