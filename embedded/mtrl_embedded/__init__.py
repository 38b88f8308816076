"""The weights of MTRL's embedded models, one folder each: `zoo` and `lookagain` (6.3 MB), `scenes` (9.8 MB)."""
