#!/usr/bin/env bash
# Batch 1024 on 32 ranks, cosine. Published: ResNet-50 76.7, VGG-16-BN 74.4.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 32 1 cosine dgc "$@"
