#!/usr/bin/env bash
# Batch 256 on 8 ranks, steps, without compression. Published: ResNet-50 76.2, VGG-16-BN 73.4.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 8 1 multistep dense "$@"
