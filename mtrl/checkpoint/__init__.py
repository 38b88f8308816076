"""What a run leaves on disk, whole or not at all."""
