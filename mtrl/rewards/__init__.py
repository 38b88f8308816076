"""Rewards: built-in functions, user functions in a sandbox, and their weighted total."""
