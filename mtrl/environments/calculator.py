"""Arithmetic from text, safe and quick whatever the text says: a few operations of the syntax tree, on bounded numbers.

Imports nothing heavy.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200  # of an expression; so the tree is shallow, too
MAX_BITS = 4096  # of an integer
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": lambda number: round(number), "floor": math.floor, "ceil": math.ceil,
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "sin": math.sin, "cos": math.cos, "tan": math.tan,
}  # fmt: skip
NAMES = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> int | float:
    """Raise a ValueError that says what cannot be computed.

    >>> calculate("2 * (3 + 4) ** 2"), calculate("sqrt(9) / 2")
    (98, 1.5)
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression):,} characters; at most {MAX_CHARACTERS} can be computed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic: write it as in Python, such as 2 * (3 + 4)") from error
    try:
        return compute(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None
    except TypeError as error:  # abs(1, 2)
        raise ValueError(str(error)) from None


def compute(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return bounded(node.value)
    if isinstance(node, ast.Name) and node.id in NAMES:
        return NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](compute(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = compute(node.left), compute(node.right)
        if isinstance(node.op, ast.Pow):
            check_power(left, right)
        return bounded(BINARY[type(node.op)](left, right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
    ):
        return bounded(FUNCTIONS[node.func.id](*map(compute, node.args)))
    what = "a comparison" if isinstance(node, ast.Compare) else repr(ast.unparse(node))[:80]
    known = ", ".join(list(FUNCTIONS)[:4])
    raise ValueError(f"{what} cannot be computed; use numbers, + - * / // % **, brackets and {known}, ..")


def check_power(base: int | float, exponent: int | float) -> None:
    """Before it is computed: 9**9**9 would take minutes and gigabytes. What passes has twice MAX_BITS at most."""
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > MAX_BITS:
        raise ValueError("the number is too large")


def bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ValueError("a root of a negative number is no real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the number is too large")
    assert isinstance(value, (int, float))
    return value
