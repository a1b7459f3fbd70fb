"""Triton providers, one file an op with the stem of its contract. Only these modules import triton."""
