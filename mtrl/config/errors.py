"""The one exception of the configuration: a report of everything that is wrong, not only of the first thing."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """All errors of a configuration, one line each: where, which key, what to do."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = list(errors)
        count = "1 error" if len(self.errors) == 1 else f"{len(self.errors)} errors"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {error}" for error in self.errors)]))
