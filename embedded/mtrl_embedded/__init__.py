"""The weights of MTRL's embedded models, one folder each: `zoo` (6.3 MB) and `scenes` (9.8 MB)."""
