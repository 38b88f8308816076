"""Generators: engines that sample responses, all behind `protocols.Generator`."""
