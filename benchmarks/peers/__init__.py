"""Other systems on the same weights in the same run: one program per peer, and one driver. See docs/benchmarks.md."""
