"""The error of everything outside the configuration that a user has to change."""


class StartError(Exception):
    """A run that cannot start: data, a model or a reward file is not as it should be."""
