"""Processes for the code of users: what they may take, how they are watched, and how they end."""
