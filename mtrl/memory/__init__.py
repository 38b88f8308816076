"""How much device memory a run takes: what is certain is counted, the rest measured in passes at the limits.

estimate   before anything is there: by formula and by passes of a model without numbers (`mtrl doctor`)
rehearsal  the passes of a step at the limits, run once on the device itself before the first step
"""
