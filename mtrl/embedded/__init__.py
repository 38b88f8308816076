"""Three embedded visual tasks, each with a tiny vision-language model that half knows it: see `task.py`, `scenes.py`
and `look_again.py`. The models are made by `python -m pretraining.pretrain`, and their weights are a package of their
own: `embedded/`."""
