"""Trackers: the files of a run, its record, the console and loggers."""
