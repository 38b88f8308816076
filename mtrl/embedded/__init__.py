"""Two embedded visual tasks, each with a tiny vision-language model that half knows it: see `task.py` and `scenes.py`.
The models are made by `python -m pretraining.pretrain`, and their weights are a package of their own: `embedded/`."""
