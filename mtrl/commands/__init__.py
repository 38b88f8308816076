"""What the commands of `cli.py` do: a file a command, each with `run(words)` and its exit status."""
