#!/usr/bin/env bash
# The token-weight grid: 3 top ratios x 3 sigmas x 2 clips = 18 runs of experiment 5, one after the other.
#
#   bash token_weight_grid.sh                                    # as published
#   bash token_weight_grid.sh experiments/zoo/experiment5.yaml   # the embedded model
#
# One loop of overrides instead of 18 files keeps the differences in one place. Arguments after the file are passed to
# every run. A finished run is skipped, so the same command continues a grid that was stopped. MTRL is the command to run
# (MTRL=echo prints the runs). The runs are written to outputs/token_weight_grid_*/.
set -euo pipefail
base=${1:-experiments/experiment5.yaml}
project=token_weight_grid_$(basename "$(dirname "$base")")
for ratio in 0.2 0.4 0.6; do
  for sigma in 0 1 2; do
    for clip in 0.5,2 0.2,3; do
      ${MTRL:-mtrl} train "$base" \
        training.project_name="$project" \
        training.experiment_name="top$ratio-sigma$sigma-clip${clip/,/-}" \
        optimization.token_weight_top_ratio="$ratio" \
        optimization.token_weight_smooth_sigma="$sigma" \
        optimization.token_weight_clip="[$clip]" \
        "${@:2}"
    done
  done
done
