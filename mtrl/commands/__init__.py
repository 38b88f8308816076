"""The commands of `cli.py`, one module each: its docstring is the help page, `run(arguments)` returns the status."""
