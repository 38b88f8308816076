"""Rewards: built-ins, user functions in their sandbox, and how parts become a total."""
