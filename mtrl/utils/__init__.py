"""Small helpers that every room may use: errors, files, seeding, plugins, the terminal."""
