"""Calls objects of users during a run, and checks the tensors that they return."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mtrl.utils.errors import RunError

Result = TypeVar("Result")


def call_user_code(what: str, function: Callable[[], Result]) -> Result:
    """Call the function; an exception ends the run with one line that names the object (`what`) and the line in its
    file. If a device is full, smaller passes are tried."""
    try:
        return function()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(f"{what} failed: {message} ({frame.filename}:{frame.lineno})") from error


def check_shape(what: str, value: object, shape: Sequence[int], meaning: str) -> None:
    if not isinstance(value, Tensor) or value.shape != tuple(shape):
        returned = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise RunError(f"{what} returned {returned}, not {list(shape)}: {meaning}")
