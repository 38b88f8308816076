"""The one exception of the configuration: a report of everything that is wrong, not only of the first thing."""

from collections.abc import Sequence

MOST_TOLD = 50


class ConfigError(ValueError):
    """All errors of a configuration, one line each: where, which key, what to do."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = list(errors)
        count = "1 error" if len(self.errors) == 1 else f"{len(self.errors)} errors"
        told = [f"  {error}" for error in self.errors[:MOST_TOLD]]
        if len(self.errors) > MOST_TOLD:
            told.append(f"  and {len(self.errors) - MOST_TOLD} more")
        super().__init__("\n".join([f"{count} in the configuration:", *told]))
