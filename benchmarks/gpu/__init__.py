"""Checks and measurements that need a GPU; `make gpu-check` runs them."""
