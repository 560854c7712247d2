"""Other systems on the same weights, in the same run: one program per peer, one driver; see docs/benchmarks.md."""
