#!/usr/bin/env bash
# Batch 8192 on 32 ranks of 8 passes, cosine. Published: ResNet-50 75.9, VGG-16-BN 71.7.
exec bash "$(dirname "${BASH_SOURCE[0]}")/row.sh" 32 8 cosine dgc "$@"
