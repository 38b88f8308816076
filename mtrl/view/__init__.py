"""What `mtrl view` shows: runs of ours and of others, read from their files, and the page that shows them. No torch."""
