#!/usr/bin/env bash
# Batch 2048 on 8 ranks of 8 passes, cosine. Published: ResNet-50 76.6, VGG-16-BN 73.8.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 8 8 cosine dgc "$@"
