"""Triton kernels beside their torch references. This module imports nothing."""
