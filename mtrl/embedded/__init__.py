"""An embedded visual task and a tiny vision-language model that half knows it: see `task.py` and `teacher.py`."""
