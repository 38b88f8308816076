#!/usr/bin/env bash
# The token-weight grid: 3 top ratios x 3 sigmas x 2 clips = 18 runs of experiment 5, one after the other.
#
#   bash token_weight_grid.sh                                    # as published
#   bash token_weight_grid.sh experiments/zoo/experiment5.yaml   # the embedded model
#
# A loop of overrides and not 18 files: what differs stands in one place. Words after the file are handed to each run; a
# run that is finished says so and the loop goes on, so the same command continues a grid that was stopped. MTRL is the
# command to run (MTRL=echo shows the runs). Afterwards the runs lie side by side in outputs/token_weight_grid_*/.
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
