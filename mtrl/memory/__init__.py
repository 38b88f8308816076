"""Device memory of a run: counted by formula, measured in passes at the limits of the configuration.

estimate   before anything is loaded: by formula and by passes of a fake model (`mtrl doctor`)
preflight  the passes of a step at the limits, run once on the device before the first step; its choices are remembered
"""
