"""What several benchmarks use: checkpoints of a chosen cost, dated results, figures as SVG."""
