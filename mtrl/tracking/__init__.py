"""Where numbers and rollouts go: files always, the console, and (later) loggers."""
