"""Every backend of kernels that this machine can run."""

from kernels.backends import native as native
