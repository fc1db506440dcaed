#!/usr/bin/env bash
# Batch 512 on 16 ranks, steps. Published: ResNet-50 76.5, VGG-16-BN 73.8.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 16 1 multistep dgc "$@"
