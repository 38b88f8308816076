"""vLLM behind the Generator seam. `generator.py` speaks our language, a host runs the engine: in this process
(`inprocess.py`), in a child process (`process.py`) or behind HTTP (`server.py`)."""
