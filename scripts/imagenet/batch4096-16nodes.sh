#!/usr/bin/env bash
# Batch 4096 on 16 ranks of 8 passes, cosine. Published: ResNet-50 76.4, VGG-16-BN 73.1.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 16 8 cosine dgc "$@"
