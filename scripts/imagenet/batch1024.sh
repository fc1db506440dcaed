#!/usr/bin/env bash
# Batch 1024 on 32 ranks, steps. Published: ResNet-50 76.3, VGG-16-BN 73.3.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 32 1 multistep dgc "$@"
