"""vLLM as a Generator. `generator.py` converts prompts and responses; a host runs the engine: in this process
(`inprocess.py`), in a child process (`process_engine.py`) or behind HTTP (`server_engine.py`)."""
