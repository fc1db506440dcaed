#!/usr/bin/env bash
# Batch 256 on 8 ranks, steps. Published: ResNet-50 76.6, VGG-16-BN 74.1.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 8 1 multistep dgc "$@"
