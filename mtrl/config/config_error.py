"""The exception of the configuration: it reports all errors, not only the first."""

from collections.abc import Sequence

MAX_ERRORS_SHOWN = 50


class ConfigError(ValueError):
    """All errors of a configuration, one line each: file and line, key, what to do."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = list(errors)
        count = "1 error" if len(self.errors) == 1 else f"{len(self.errors)} errors"
        lines = [f"  {error}" for error in self.errors[:MAX_ERRORS_SHOWN]]
        if len(self.errors) > MAX_ERRORS_SHOWN:
            lines.append(f"  and {len(self.errors) - MAX_ERRORS_SHOWN} more")
        super().__init__("\n".join([f"{count} in the configuration:", *lines]))
