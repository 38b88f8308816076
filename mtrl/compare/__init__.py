"""Comparing configurations over the same seeds: `batch` runs them, `arms` reads their runs, `statistics` tests them."""
