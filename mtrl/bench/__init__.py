"""`mtrl bench`: steps of `mtrl train` on a model of random weights, timed phase by phase."""
