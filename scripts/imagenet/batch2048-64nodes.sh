#!/usr/bin/env bash
# Batch 2048 on 64 ranks, cosine. Published: ResNet-50 76.8, VGG-16-BN 74.2.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 64 1 cosine dgc "$@"
