"""Text from user code, made short and harmless for terminals and logs. Imports nothing heavy."""

from __future__ import annotations

import re

MAX_FAILURE = 8_000  # characters of the reason of a failure
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def sanitize_tail(text: str, limit: int = MAX_FAILURE) -> str:
    r"""Return the end of a text from a user's function, which is the important part of a traceback. Terminal control
    characters and surrogates are escaped.

    >>> sanitize_tail("a \x1b[2J b")
    'a \\x1b[2J b'
    """
    return UNPRINTABLE.sub(lambda sign: ascii(sign[0])[1:-1], text[-limit:])[-limit:]
