"""What the commands of `cli.py` do: a file a command, each with `run(arguments)` and its exit status."""
