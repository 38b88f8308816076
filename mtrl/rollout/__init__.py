"""Generators: engines that sample responses. All keep the promises of `protocols.Generator`."""
