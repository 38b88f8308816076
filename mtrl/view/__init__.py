"""`mtrl view`: reads the files of MTRL runs and of other trainers, and shows them on a page. No torch."""
