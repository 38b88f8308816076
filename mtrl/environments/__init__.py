"""Environments with tools, as TRL takes them, in processes with limits: whatever one does, the others go on."""
